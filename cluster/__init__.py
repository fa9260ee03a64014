"""Sites, jobs and schedulers. Standard library only, so that it starts at once anywhere."""

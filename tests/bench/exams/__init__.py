"""The planner's exams: `make validate` prints how far estimates are from what others measured."""

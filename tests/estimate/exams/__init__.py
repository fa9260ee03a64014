"""The planner's exams: `make validate` prints how far its estimates are from what others
measured.
"""

"""Jobs of a cluster from a machine without its scheduler, by the system's own OpenSSH
and rsync.

`connection.py` is one command on the login node; `mirror.py` the copy of a run directory that this
machine keeps; `answer.py` runs there and answers; `submit.py` sends a job there. Standard library
only.
"""

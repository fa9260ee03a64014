"""Submits and monitors jobs of a cluster from a machine without its scheduler, with the system's
own OpenSSH and rsync.

`connection.py` runs one command on the login node. `mirror.py` keeps a mirror, a copy of a run
directory, on this machine. `answer.py` runs on the login node and answers requests of the mirror.
`submit.py` submits a job through the login node. Standard library only.
"""

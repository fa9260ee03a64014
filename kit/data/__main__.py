"""`python -m kit.data FOLDER`: a rank of a job that builds a dataset; FOLDER RANK SIZE: one more process of a build."""

import os
import sys
from pathlib import Path

from kit.data.build import build_in_job
from kit.data.pieces import Work
from kit.data.team import follow
from kit.errors import DataError

folder, *place = sys.argv[1:]
try:
    if place:
        rank, size = map(int, place)
        follow(Work(Path(folder)), rank, size)
    else:
        build_in_job(Path(folder), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
except DataError as error:
    print(error, file=sys.stderr)
    sys.exit(os.EX_CONFIG)  # another attempt would end the same way

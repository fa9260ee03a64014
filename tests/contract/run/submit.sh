#!/bin/bash
# run: 2 processes on this machine, each running
#   ["/tmp/kit-contract/python/bin/python", "-m", "kit.train", "--run", "/tmp/kit-contract/run"]
# Run this script to start the next attempt in the foreground; Ctrl-C ends it.
cd /tmp/kit-contract/kit && exec /tmp/kit-contract/python/bin/python -m cluster.local.supervisor /tmp/kit-contract/run

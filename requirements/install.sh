#!/bin/sh
# Installs this project into .venv with some extras: requirements/install.sh notebooks,dev
# uv takes less than half of pip's time. Where uv fails, for example at an index whose password only pip has, pip installs.
# PIP and UV name other programs.
set -eu
extras=$1
bin=.venv/bin

# A torch that is in .venv already is kept: its release replaces the pinned one. Without one, a machine that offers a CPU build of
# torch (PIP_FIND_LINKS, or an index of its own) gets that, any other the usual build.
# shellcheck disable=SC2012  # The names have no spaces.
torch=$(ls -d .venv/lib/python3*/site-packages/torch-*.dist-info 2>/dev/null | sed -nE 's/.*\/torch-(.*)\.dist-info$/\1/p')
sed "${torch:+s/^torch==.*/torch==$torch/}" constraints.txt >.venv/constraints.txt

# Modules are compiled when they are imported first, which an eighth of all 24,000 ever are: 9 s of a core instead of 46 s.
install_by_pip() {
    ${PIP:-$bin/pip} install --quiet --disable-pip-version-check --no-compile -c .venv/constraints.txt "$@"
}

# uv reads none of pip's settings, so it gets the places where pip looks.
places() {
    $bin/pip config list | sed -nE "s/\\\\n/ /g; s/^.*\.(find-links|index-url|extra-index-url)='(.*)'\$/\1 \2/p" \
        | awk '{ for (i = 2; i <= NF; i++) print "--" $1, $i }'
}

install_by_uv() {
    ${UV:-$bin/uv} pip install --quiet --python $bin/python --index-strategy unsafe-best-match -c .venv/constraints.txt "$@"
}

install_by_pip uv || echo "uv cannot be installed, so pip installs everything"
echo "uv pip install -e '.[$extras]' into .venv"
# shellcheck disable=SC2046  # Options and their values are words of their own.
install_by_uv $(places) -e ".[$extras]" || install_by_pip -e ".[$extras]"

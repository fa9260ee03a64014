"""Shell lines of a site file, run by the real bash: a failure of a line ends the script."""

import subprocess

import pytest

from cluster.record import ConfigError
from cluster.site_lines import checked_lines
from tests.cluster.shell import shellcheck

FILES = {
    "good.sh": "grep -q nothing /dev/null\nexport FOUND=yes\n",
    "last_fails.sh": "export FOUND=yes\n[ -d /nonexistent ] && echo x\n",
    "conda.sh": 'conda() { grep -q x /dev/null; lookup "$2"; }\n'
    'lookup() { [ "$1" = base ] || { echo "EnvironmentNameNotFound: $1" >&2; return 1; }; }\n',
    "strict.sh": "set -e\ngrep -q nothing /dev/null\n",
    "leaves.sh": "exit 0\n",
}


def run(folder, lines, in_function):
    """Runs shell lines in a script, or in an exported function as for the ranks of a job. Returns
    (exit code, standard output, last line of standard error)."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    body = [*checked_lines(tuple(lines), "site.slurm.setup"), "echo goes on"]
    if in_function:
        body = ["run_rank() {", *(f"    {line}" for line in body), "}", "export -f run_rank"]
        body.append("bash -c run_rank")
    done = subprocess.run(
        ["bash", "-c", "\n".join(body)], cwd=folder, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, (done.stderr.splitlines() or [""])[-1]


@pytest.mark.parametrize("in_function", [False, True], ids=["script", "rank"])
@pytest.mark.parametrize(
    "lines",
    [
        ["source good.sh", 'echo "$FOUND $UNSET"'],
        ["source conda.sh", "conda activate base"],
        ["[ -f missing.sh ] && source missing.sh"],
        ["if [ -f missing.sh ]; then", "    source missing.sh", "else", "    true", "fi"],
        ["for name in a b; do", "  export X=$name", "done  # a comment"],
        ["false || echo 'not so bad' >&2"],
        ["grep -q x /dev/null || true", "! false"],
        ["export A=1 && \\", "export B=2"],
        ["case $A in", "  x) false && true ;;", "  *) true ;;", "esac"],
        ["cat <<END >/dev/null", "if", "END"],
        ["(cd / && ls) >/dev/null", "echo warning: odd >&2", "# a comment", ""],
        ["f() { false; true; }", "f"],
    ],
    ids=lambda lines: lines[0][:24],
)
def test_successful_setup_lines_continue_the_script(tmp_path, lines, in_function):
    code, output, _ = run(tmp_path, lines, in_function)
    assert code == 0 and output.endswith("goes on\n")


@pytest.mark.parametrize("in_function", [False, True], ids=["script", "rank"])
@pytest.mark.parametrize(
    ("lines", "line", "how"),
    [
        (["true", "source /nonexistent/activate env"], None, "failed with code 1"),
        (["source conda.sh", "conda activate nosuchenv"], None, "failed with code 1"),
        (["source last_fails.sh"], None, "failed with code 1"),
        (["cd /nonexistent && source good.sh", "true"], 0, "failed with code 1"),
        (["source conda.sh && conda activate nosuchenv"], None, "failed with code 1"),
        (["nosuchcommand --load x"], None, "failed with code 127"),
        (["cd /nonexistent; export A=1"], None, "failed with code 1"),
        (["(exit 3)"], None, "failed with code 3"),
        (["if true; then", "  false", "  true", "fi"], "if true; then false true fi", "code 1"),
        (["source leaves.sh"], None, "ended the shell with code 0"),
        (["exit 7"], None, "ended the shell with code 7"),
        (["source strict.sh"], None, "ended the shell with code 1"),
    ],
    ids=lambda value: value[-1][:24] if isinstance(value, list) else "",
)
def test_failed_setup_line_ends_the_script(tmp_path, lines, line, how, in_function):
    code, output, said = run(tmp_path, lines, in_function)
    line = line if isinstance(line, str) else lines[-1 if line is None else line]
    assert code == 1 and output == ""
    assert said.startswith(f"kit: setup: {line} ") and said.endswith(how), said


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["true", "if true; then", "  echo x"], r"setup\[1\].*'if true; then'.*unexpected end"),
        (["echo 'open"], r"setup\[0\].*matching"),
        (["export A=1 \\"], "ends with a backslash"),
        (["cat <<END", "text"], "here-document"),
        (["fi"], r"unexpected token"),
    ],
)
def test_setup_lines_with_syntax_errors_are_refused(lines, words):
    with pytest.raises(ConfigError, match=words):
        checked_lines(tuple(lines), "site.slurm.setup")


def test_checked_lines_pass_shellcheck():
    lines = ("cd /x && export A=1", "if true; then", "  true", "fi")
    shellcheck("\n".join(["#!/bin/bash", *checked_lines(lines, "site.slurm.setup")]) + "\n")

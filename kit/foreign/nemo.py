"""NeMo's logs: a line a step of NeMo 2, progress bars of NeMo on Neuron (NxDT), and those of HLAT's own script.

NeMo's two are the same metrics by name, written down in two ways; a held-out loss stays among them until the next one.
"""

import re
from typing import Any

from kit.foreign.logs import LoggedStep, LogParser, number, whole


class NemoLog(LogParser):
    """Lines of NeMo 2.

    Source: nemo/lightning/pytorch/callbacks/progress_printer.py of NVIDIA/NeMo; its lines in NVIDIA/dgxc-benchmarking.
    """

    LINE = re.compile(r"Training epoch (?P<epoch>\d+), iteration (?P<n>\d+)/(?P<total>\d+) \|(?P<fields>.*)")
    FINISHED = re.compile(r"`Trainer\.fit` stopped: `max_\w+=\d+` reached")

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple = ()
        self._validation = ""

    def feed(self, line: str) -> list[LoggedStep]:
        if "Training epoch " in line:
            found = self.LINE.search(line)
            texts = _texts(found["fields"], "|", ":") if found else {}
            if found and texts.get("global_step", "").isdigit() and number(texts.get("reduced_train_loss")) is not None:
                return self._line(found, texts)
            self.skipped_lines += 1
        self.done = self.done or bool(self.FINISHED.search(line))
        return []

    def _line(self, found: re.Match, texts: dict[str, str]) -> list[LoggedStep]:
        step = int(texts["global_step"]) + 1
        ahead = step - int(found["n"])  # older releases count a line's iteration, and the last one, from 0
        total = int(found["total"]) + ahead if found["epoch"] == "0" and ahead in (0, 1) else None
        batch, memory = number(texts.get("global_batch_size")), number(texts.get("peak_memory_usage"))
        consumed = whole(number(texts.get("consumed_samples")))
        return self._told(
            step, texts, total_steps=total, samples=whole(batch), consumed_samples=consumed, memory_bytes=whole(memory)
        )

    def _told(self, step: int, texts: dict[str, str], **more: Any) -> list[LoggedStep]:
        """Returns what NeMo's metrics say, nothing if the last line has said the same."""
        fields = {name: value for name, text in texts.items() if (value := number(text)) is not None}
        validation = texts.get("val_loss", "")
        new, self._validation = validation != self._validation, validation
        norms = ("gradient_norm", "grad_norm")
        said = (step, *(texts.get(name) for name in ("reduced_train_loss", "lr", *norms)))
        again, self._last = said == self._last, said
        held_out = fields.get("val_loss") if new else None
        if again:  # a bar was drawn again
            return [LoggedStep(step=step, validation_loss=held_out)] if new else []
        return [
            LoggedStep(
                step=step,
                step_time_s=fields.get("train_step_timing in s"),
                loss=fields["reduced_train_loss"],
                grad_norm=next((fields[name] for name in norms if name in fields), None),
                learning_rate=fields.get("lr"),
                validation_loss=held_out,
                printed_samples_per_s=fields.get("throughput"),
                **more,
            )
        ]


class NxdtLog(NemoLog):
    """Progress bars of NeuronX Distributed Training (NeMo on Lightning), and the LOG lines of HLAT's training script.

    Source: AWS Neuron documentation, NxDT tutorials; `log_metrics` of aws-neuron/neuronx-distributed-training;
    `Logger.log` of awslabs/HLAT.
    """

    BAR = re.compile(
        r"Epoch (?P<epoch>\d+):(?:(?!Epoch ).)*?(?:(?P<n>\d+)/(?P<total>\d+) )?"
        r"\[(?P<clock>[\d:]+)(?:<[^,\]]*)?,(?P<fields>[^\]]*)\]"
    )
    counts_before = True
    LOG = re.compile(r"LOG (\w{3} \w{3} +\d+ [\d:]{8} \d{4}) - \((\d+), (\d+)\) (step_loss : .*)$")

    def __init__(self) -> None:
        super().__init__()
        self._others = 0  # batches that a bar counts beside training steps: held-out ones

    def feed(self, line: str) -> list[LoggedStep]:
        if "reduced_train_loss=" in line or "global_step=" in line:
            bars = list(self.BAR.finditer(line))
            self.skipped_lines += not bars
            return [step for bar in bars for step in self._bar(bar)]
        if "step_loss : " in line:
            return self._log(line)
        self.done = self.done or bool(self.FINISHED.search(line))
        return []

    def _bar(self, bar: re.Match) -> list[LoggedStep]:
        texts = _texts(bar["fields"], ",", "=")
        count, loss = number(texts.get("global_step")), number(texts.get("reduced_train_loss"))
        if count is None or loss is None:
            self.skipped_lines += count is None
            return []
        step = int(count) + 1
        if bar["n"] is not None:
            drawn = int(bar["epoch"]) * int(bar["total"]) + int(bar["n"])
            if "e" in texts["global_step"]:  # tqdm rounds to three digits where that is shorter: 1000 and 1004 are 1e+3
                step = drawn - self._others
            self._others = drawn - step
        elif "e" in texts["global_step"]:
            self.skipped_lines += 1
            return []
        consumed = texts.get("consumed_samples", "e")
        return self._told(
            step,
            texts,
            total_steps=None if bar["total"] is None else int(bar["total"]),
            consumed_samples=None if "e" in consumed else whole(number(consumed)),
            clock_s=_clock(bar["clock"]),
        )

    def _log(self, line: str) -> list[LoggedStep]:
        found = self.LOG.search(line)
        fields = {name: number(text) for name, text in re.findall(r"([\w-]+) : (\S+)", found[4])} if found else {}
        time = self.unix_time(" ".join(found[1].split()), "%a %b %d %H:%M:%S %Y") if found else None
        if not found or fields.get("step_loss") is None or fields.get("throughput") is None or time is None:
            self.skipped_lines += 1
            return []
        return [
            LoggedStep(
                step=int(found[3]),
                clock_s=time,
                time=time,
                loss=fields["step_loss"],
                grad_norm=fields.get("grad-norm"),
                learning_rate=fields.get("learning_rate"),
                printed_samples_per_s=fields["throughput"],
            )
        ]


def _texts(body: str, between: str, sign: str) -> dict[str, str]:
    """Returns the values in a line by their names, as written."""
    pairs = [part.partition(sign) for part in body.split(between) if sign in part]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _clock(text: str) -> float:
    """Returns the seconds of `43:24:54` or `03:24`."""
    return float(sum(60**i * int(part or 0) for i, part in enumerate(reversed(text.split(":")))))

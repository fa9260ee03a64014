"""Checkpoints of a run leave it as a Hugging Face folder."""

import pytest
import torch

from kit.convert.hugging_face import export_run, import_hugging_face
from kit.errors import CheckpointError

# Saving without a process group is meant.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_exported_checkpoint_has_the_weights_and_the_tokenizer_of_its_run(
    run, tiny_decoder, tmp_path
):
    from transformers import AutoTokenizer

    folder = export_run(run, None, tmp_path / "hf")
    found = import_hugging_face(folder).decoder()
    assert all(
        torch.equal(a, b)
        for a, b in zip(found.parameters(), tiny_decoder.parameters(), strict=True)
    )
    text = "the loss of a layer"
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False).input_ids
    assert ids == list(run.dataset().tokenizer().encode(text))
    with pytest.raises(CheckpointError, match="step 7"):
        export_run(run, 7, tmp_path / "none")
    assert not (tmp_path / "none").exists()

"""One item taken apart agrees with the score of the same item."""

import pytest
import torch

from kit.errors import ConfigError
from kit.evaluate import evaluate_model
from kit.evaluate.explain import explain_item
from kit.evaluate.harness import choose_items


def test_an_item_has_the_log_likelihoods_of_its_choices(tiny_decoder, tokenizer, benchmarks):
    item = explain_item(tiny_decoder, tokenizer, 64, "arc_easy", 3, task_data=benchmarks)
    assert item.prompt == "Question: What warms planet 3?\nAnswer:"
    assert [choice.text for choice in item.choices] == [
        "the sun",
        "a cat",
        "3 stones",
        "none of these",
    ]
    assert [choice.right for choice in item.choices] == [True, False, False, False]
    for choice in item.choices:
        prompt, whole = (
            tokenizer.encode(item.prompt),
            tokenizer.encode(f"{item.prompt} {choice.text}"),
        )
        with torch.no_grad():
            log_p_TV = tiny_decoder(torch.tensor([whole]))[0].log_softmax(-1)
        expected = sum(float(log_p_TV[i - 1, whole[i]]) for i in range(len(prompt), len(whole)))
        assert choice.log_likelihood == pytest.approx(expected, abs=1e-4)
        assert choice.num_tokens == len(whole) - len(prompt)
        assert choice.per_character == pytest.approx(expected / len(choice.text), abs=1e-5)
    assert "acc_norm" in item.to_text() and "the sun" in item._repr_html_()


def test_what_it_takes_for_the_answer_is_what_the_score_counts(tiny_decoder, tokenizer, benchmarks):
    chosen = choose_items("arc_easy", 30, 6, seed=0)
    picked = [
        explain_item(tiny_decoder, tokenizer, 64, "arc_easy", i, task_data=benchmarks)
        for i in chosen
    ]
    options = {"task_data": benchmarks, "limit": 6, "seed": 0}
    score = evaluate_model(tiny_decoder, tokenizer, 64, ("arc_easy",), **options)["arc_easy"]
    assert score.metric("acc").value == pytest.approx(sum(item.chosen.right for item in picked) / 6)
    assert score.metric("acc_norm").value == pytest.approx(
        sum(item.chosen_norm.right for item in picked) / 6
    )


def test_what_has_no_choices_or_no_such_item_is_refused(tiny_decoder, tokenizer, benchmarks):
    with pytest.raises(ConfigError, match="index: 30 is not allowed. piqa has items 0 to 29"):
        explain_item(tiny_decoder, tokenizer, 64, "piqa", 30, task_data=benchmarks)

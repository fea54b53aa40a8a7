"""``--oracle-length``: a loss and accuracies without the end symbol, against loops over the words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq.data import Dictionary

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.criterions.base import SGCriterionConfig
from fairseq_sg.criterions.cross_entropy_orthogonality import CrossEntropyOrthogonality
from fairseq_sg.criterions.oracle_length import scored

PAD, EOS, VOCABULARY = 1, 2, 9
#: Targets with their end symbols; the last has no word.
TARGETS = [[4, 5, 3, EOS], [8, EOS], [6, 7, 8, 4, 5, EOS], [EOS]]


def task(**options) -> SimpleNamespace:
    dictionary = Dictionary()
    for word in range(VOCABULARY - dictionary.nspecial):
        dictionary.add_symbol(f"w{word}")
    return SimpleNamespace(target_dictionary=dictionary, cfg=SimpleNamespace(**options))


def batch(extra: int = 0, left: bool = False) -> dict:
    width = max(map(len, TARGETS)) + extra
    rows = [[PAD] * (width - len(row)) + row if left else row + [PAD] * (width - len(row)) for row in TARGETS]
    return {"target": torch.tensor(rows), "ntokens": sum(map(len, TARGETS)), "net_input": {}}


def logits_for(sample: dict, seed: int = 0) -> torch.Tensor:
    """Random logits (B, N, V) in which the end symbol and padding are the largest almost everywhere."""
    logits = torch.randn(*sample["target"].shape, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    logits = logits.double()
    logits[..., [PAD, EOS]] += 3
    return logits.requires_grad_()


def words_of(sample: dict, logits: torch.Tensor):
    """Of every sentence its (logits of all but the end symbol, number of the word among these), a word each."""
    kept = [symbol for symbol in range(VOCABULARY) if symbol != EOS]
    for row, scores in zip(sample["target"].tolist(), logits):
        yield [(scores[n, kept], kept.index(word)) for n, word in enumerate(row) if word not in (PAD, EOS)]


@pytest.mark.parametrize("extra,left", [(0, False), (3, False), (2, True)])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_loss_and_accuracy_are_those_of_the_words(epsilon, extra, left):
    sample = batch(extra, left)
    logits = logits_for(sample)
    config = SGCriterionConfig(sentence_avg=False, label_smoothing=epsilon)
    criterion = CrossEntropyOrthogonality.build_criterion(config, task(oracle_length=True))
    loss, nll, exact, predictions, right = criterion.score(logits, sample)[:5]

    expected_loss = expected_nll = 0.0
    expected_exact, expected_right, words = [], 0, 0
    for sentence in words_of(sample, logits):
        hits = []
        for scores, word in sentence:
            log_probabilities = (scores - scores.logsumexp(0)).float()
            expected_nll += -log_probabilities[word]
            # fairseq spreads ε over the other symbols.
            share = epsilon / (len(scores) - 1)
            expected_loss += -(1 - epsilon - share) * log_probabilities[word] - share * log_probabilities.sum()
            outputs = scores.detach().clone()
            outputs[PAD] = -torch.inf
            hits.append(int(outputs.argmax()) == word)
        words += len(sentence)
        expected_right += sum(hits)
        expected_exact.append(all(hits))
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(nll, expected_nll)
    assert exact.tolist() == expected_exact and expected_exact[-1]
    assert (predictions, right.item()) == (words, expected_right) and words == 9
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient[..., EOS].any() and gradient[..., 4:].any()


def test_accuracy_is_that_of_greedy_decoding_to_the_given_length():
    """A decoder whose next word depends on all words before, fed with its own output."""
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))

    def next_logits(prefix):
        return sum(table[symbol] / (1 + age) for age, symbol in enumerate(reversed(prefix)))

    targets, decoded = [], []
    for seed in range(40):
        length = int(torch.randint(1, 4, (1,), generator=torch.Generator().manual_seed(seed)))
        words = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(100 + seed)).tolist()
        output = []
        for _ in range(length):
            outputs = next_logits([EOS, *output]).clone()
            outputs[[PAD, EOS]] = -torch.inf
            output.append(int(outputs.argmax()))
        # Half of the sentences are the decoder's own.
        targets.append(output if seed % 2 else words)
        decoded.append(output)
    rows = [target + [EOS] + [PAD] * (3 - len(target)) for target in targets]
    logits = torch.stack(
        [torch.stack([next_logits([EOS, *row[:n]]) for n in range(4)]) for row in rows]
    )  # teacher-forced
    sample = {"target": torch.tensor(rows), "ntokens": sum(len(target) + 1 for target in targets)}
    config = SGCriterionConfig(sentence_avg=False)
    exact = CrossEntropyOrthogonality.build_criterion(config, task(oracle_length=True)).score(logits, sample).right
    assert exact.tolist() == [output == target for output, target in zip(decoded, targets)]
    assert 20 <= exact.sum() < 40


@pytest.mark.parametrize("without", [task(), task(oracle_length=False), SimpleNamespace()])
def test_without_the_option_nothing_changes(without):
    sample = batch()
    logits = logits_for(sample)
    found, target, tokens = scored(without, logits, sample)
    assert found is logits and target is sample["target"] and tokens == sample["ntokens"]

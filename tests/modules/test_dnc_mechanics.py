"""What masks, de-allocation and sharpness do, without training: the claims of ``scripts/dnc_mechanics.py``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "scripts" / "dnc_mechanics.py"


@pytest.fixture(scope="module")
def mechanics():
    spec = importlib.util.spec_from_file_location("dnc_mechanics", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("noise,first,last", [(0.05, 0.96, 0.77), (0.1, 0.89, 0.55)])
def test_links_blur_and_sharpness_keeps_them(mechanics, noise, first, last):
    """Without sharpness the sum of the weights shrinks, and the right cell has less and less of it."""
    (plain, share), (sharp, _) = (mechanics.blur(noise, 14, how, draws=200) for how in (False, True))
    assert all(before > after for before, after in zip(plain, plain[1:])) and plain[-1] < 0.3
    assert (share[0], share[-1]) == pytest.approx((first, last), abs=0.03)
    assert min(sharp) > 0.99


def test_no_noise_no_blur(mechanics):
    weights, shares = mechanics.blur(0.0, 14, False, draws=2)
    assert min(weights) == min(shares) == 1.0


def test_stale_content_is_found_again_without_de_allocation(mechanics):
    stale, fresh, wrong = mechanics.alias(None, draws=200)
    assert stale == pytest.approx(fresh, abs=1e-9) and wrong > 1.5


def test_de_allocation_shrinks_what_is_read_before_it_hides_it(mechanics):
    """The look-up still finds the cell at ψ = 0.1; what is read from it is right all the same."""
    stale, fresh, wrong = mechanics.alias(0.1, draws=200)
    assert stale == pytest.approx(fresh, rel=1e-3) and wrong < 0.3
    stale, fresh, wrong = mechanics.alias(1e-8, draws=200)
    assert stale < 0.01 and fresh > 0.8 and wrong < 0.3


def test_a_mask_finds_what_a_plain_look_up_does_not(mechanics):
    plain, masked = (mechanics.look_up(8, 8, how, silent=False, draws=300) for how in (False, True))
    assert masked[0] > 0.88 > 0.6 > plain[0] and masked[1] > 0.88 > 0.7 > plain[1]


def test_command(mechanics, capsys):
    assert mechanics.main(["--draws", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if ":" in line] == ["sharpness", "de-allocation", "masks"]
    with pytest.raises(SystemExit):
        mechanics.main(["--draws", "0"])
    assert "--draws is 0" in capsys.readouterr().err

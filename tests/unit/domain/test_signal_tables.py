"""Signals are declared once, with their units."""

from trimtab.domain.signals import AVERAGES, RATES, RATIO_SIGNALS, Signal


def test_a_counter_or_gauge_is_one_signal() -> None:
    assert len(set(RATES.values())) == len(RATES)
    assert len(set(AVERAGES.values())) == len(AVERAGES)


def test_ratios_are_the_signals_that_say_so() -> None:
    assert {signal.value for signal in RATIO_SIGNALS} == {
        signal.value for signal in Signal if signal.value.endswith("_ratio")
    }


def test_a_member_by_its_value_has_its_unit() -> None:
    assert Signal("gpu_power_w").unit == "W"
    assert Signal("decode_tps") is Signal.DECODE_TPS
    assert all(signal.unit for signal in Signal)

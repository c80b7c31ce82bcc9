"""What a GPU exporter's page says of each GPU, stated by hand and against prometheus_client's parser."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tests.support.properties import costly
from trimtab.domain.dialects.dcgm import GpuPageError, GpuValues, read_gpu_page

ABSENT = math.nan


def labels(gpu: int | str, *, more: str = "", node: str = "gpu-a") -> str:
    return (
        f'gpu="{gpu}",UUID="GPU-00000000-0000-0000-0000-00000000000{gpu}",pci_bus_id="00000000:0{gpu}:00.0",'
        f'device="nvidia{gpu}",modelName="NVIDIA A100-SXM4-80GB"{more},Hostname="{node}"'
    )


def page(*samples: str) -> bytes:
    """Samples of the exporter in their families, with the comments that it writes."""
    families: dict[str, list[str]] = {}
    for sample in samples:
        families.setdefault(sample.partition("{")[0], []).append(sample)
    lines: list[str] = []
    for name, rows in families.items():
        lines += [f"# HELP {name} What {name} is.", f"# TYPE {name} gauge", *rows]
    return "\n".join([*lines, ""]).encode()


FULL = page(
    f"DCGM_FI_DEV_SM_CLOCK{{{labels(0)}}} 1410",
    f"DCGM_FI_DEV_SM_CLOCK{{{labels(1)}}} 210",
    f"DCGM_FI_DEV_GPU_TEMP{{{labels(0)}}} 61",
    f"DCGM_FI_DEV_POWER_USAGE{{{labels(0)}}} 312.500000",
    f"DCGM_FI_DEV_POWER_USAGE{{{labels(1)}}} 61.250000",
    f"DCGM_FI_DEV_GPU_UTIL{{{labels(0)}}} 97",
    f"DCGM_FI_DEV_GPU_UTIL{{{labels(1)}}} 0",
    f"DCGM_FI_DEV_MEM_COPY_UTIL{{{labels(0)}}} 44",
    f"DCGM_FI_DEV_FB_FREE{{{labels(0)}}} 20000",
    f"DCGM_FI_DEV_FB_FREE{{{labels(1)}}} 80000",
    f"DCGM_FI_DEV_FB_USED{{{labels(0)}}} 60000",
    f"DCGM_FI_DEV_FB_USED{{{labels(1)}}} 0",
    f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{labels(0)}}} 0.951000",
    f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{labels(1)}}} 0.000000",
    f"DCGM_FI_PROF_SM_ACTIVE{{{labels(0)}}} 0.425000",
    f"DCGM_FI_PROF_SM_ACTIVE{{{labels(1)}}} 0.000000",
)


def same(left: GpuValues, right: GpuValues) -> bool:
    return all(
        (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-12) for a, b in zip(left, right, strict=True)
    )


def test_each_gpu_of_a_node_has_its_own_values() -> None:
    reading = read_gpu_page(FULL)

    assert sorted(reading.gpus) == [0, 1]
    assert same(reading.gpus[0], GpuValues(0.97, 0.425, 312.5, 0.75))
    assert same(reading.gpus[1], GpuValues(0.0, 0.0, 61.25, 0.0))
    assert reading.rejected == 0


@pytest.mark.parametrize(
    ("samples", "expected", "rejected"),
    [
        pytest.param(['DCGM_FI_DEV_GPU_UTIL{gpu="0"} 50'], (0.5, ABSENT, ABSENT, ABSENT), 0, id="the rest is absent"),
        pytest.param(
            ['DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="0"} 0.25'],
            (0.25, ABSENT, ABSENT, ABSENT),
            0,
            id="the profiler's counter where there is no utilisation",
        ),
        pytest.param(
            ['DCGM_FI_DEV_GPU_UTIL{gpu="0"} 50', 'DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="0"} 0.25'],
            (0.5, ABSENT, ABSENT, ABSENT),
            0,
            id="utilisation before the profiler's counter",
        ),
        pytest.param(
            ['DCGM_FI_DEV_GPU_UTIL{gpu="0", UUID="GPU-1"} 50'],
            (0.5, ABSENT, ABSENT, ABSENT),
            0,
            id="a space after the comma, as older exporters write it",
        ),
        pytest.param(
            ['DCGM_FI_DEV_FB_USED{gpu="0"} 300', 'DCGM_FI_DEV_FB_FREE{gpu="0"} 600'],
            (ABSENT, ABSENT, ABSENT, 1 / 3),
            0,
            id="memory without what is reserved",
        ),
        pytest.param(
            [
                'DCGM_FI_DEV_FB_USED{gpu="0"} 300',
                'DCGM_FI_DEV_FB_FREE{gpu="0"} 600',
                'DCGM_FI_DEV_FB_RESERVED{gpu="0"} 100',
            ],
            (ABSENT, ABSENT, ABSENT, 0.3),
            0,
            id="reserved memory is there, and not in use",
        ),
        pytest.param(
            [
                'DCGM_FI_DEV_FB_USED{gpu="0"} 300',
                'DCGM_FI_DEV_FB_FREE{gpu="0"} 600',
                'DCGM_FI_DEV_FB_RESERVED{gpu="0"} 9223372036854775794',
            ],
            (ABSENT, ABSENT, ABSENT, ABSENT),
            1,
            id="reserved memory that could not be read is not none",
        ),
        pytest.param(
            ['DCGM_FI_DEV_FB_USED{gpu="0"} 300'], (ABSENT, ABSENT, ABSENT, ABSENT), 0, id="half of a ratio is none"
        ),
        pytest.param(
            ['DCGM_FI_DEV_FB_USED{gpu="0"} 0', 'DCGM_FI_DEV_FB_FREE{gpu="0"} 0'],
            (ABSENT, ABSENT, ABSENT, ABSENT),
            0,
            id="a card without memory has no ratio",
        ),
        pytest.param(
            ['DCGM_FI_DEV_POWER_USAGE{gpu="0"} NaN', 'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 1'],
            (0.01, ABSENT, ABSENT, ABSENT),
            1,
            id="NaN",
        ),
        pytest.param(
            ['DCGM_FI_DEV_POWER_USAGE{gpu="0"} +Inf', 'DCGM_FI_DEV_GPU_UTIL{gpu="0"} -1'],
            (ABSENT, ABSENT, ABSENT, ABSENT),
            2,
            id="infinite, negative",
        ),
        pytest.param(
            ['DCGM_FI_DEV_GPU_UTIL{gpu="0"} 101', 'DCGM_FI_PROF_SM_ACTIVE{gpu="0"} 1.01'],
            (ABSENT, ABSENT, ABSENT, ABSENT),
            2,
            id="more than all of it",
        ),
        pytest.param(
            ['DCGM_FI_DEV_GPU_UTIL{gpu="0"} 2147483632', 'DCGM_FI_DEV_POWER_USAGE{gpu="0"} 140737488355328.000000'],
            (ABSENT, ABSENT, ABSENT, ABSENT),
            2,
            id="DCGM's blanks",
        ),
        pytest.param(
            ['DCGM_FI_DEV_GPU_UTIL{gpu="0"} ', 'DCGM_FI_DEV_POWER_USAGE{gpu="0"} N/A'],
            (ABSENT, ABSENT, ABSENT, ABSENT),
            2,
            id="no number",
        ),
        pytest.param(
            [
                'DCGM_FI_DEV_GPU_UTIL{gpu="0",pod="chat-0"} 40',
                'DCGM_FI_DEV_GPU_UTIL{gpu="0",pod="code-0"} 40',
                'DCGM_FI_DEV_POWER_USAGE{gpu="0",pod="chat-0"} 100',
                'DCGM_FI_DEV_POWER_USAGE{gpu="0",pod="code-0"} 200',
            ],
            (0.4, ABSENT, ABSENT, ABSENT),
            1,
            id="a shared GPU's series count once, where they agree",
        ),
        pytest.param(
            [
                'DCGM_FI_DEV_POWER_USAGE{gpu="0"} 200',
                'DCGM_FI_PROF_GR_ENGINE_ACTIVE{gpu="0",GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"} 0.9',
                'DCGM_FI_DEV_FB_USED{gpu="0",GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"} 9000',
                'DCGM_FI_DEV_FB_FREE{gpu="0",GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"} 1000',
            ],
            (ABSENT, ABSENT, 200.0, ABSENT),
            0,
            id="instances of a partitioned GPU are not the GPU",
        ),
        pytest.param(
            [r'DCGM_FI_DEV_GPU_UTIL{pod="a\",gpu=\"3",gpu="0",vgpu="4",GPU_I_ID=""} 10'],
            (0.1, ABSENT, ABSENT, ABSENT),
            0,
            id="a label's text is no label",
        ),
    ],
)
def test_a_value_is_read_or_absent_never_guessed(
    samples: list[str], expected: tuple[float, ...], rejected: int
) -> None:
    reading = read_gpu_page(page(*samples))

    assert sorted(reading.gpus) == [0]
    assert same(reading.gpus[0], GpuValues(*expected)), reading
    assert reading.rejected == rejected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"# HELP DCGM_FI_DEV_GPU_UTIL x\n",
        b'vllm:num_requests_running{engine="0"} 1\n',
        b'DCGM_FI_DEV_GPU_TEMP{gpu="0"} 40\n',
        b'DCGM_FI_DEV_GPU_UTIL{nvswitch="0"} 40\n',
        b'DCGM_FI_DEV_GPU_UTIL{gpu="1024"} 40\n',
        b'DCGM_FI_DEV_GPU_UTIL{gpu="zero"} 40\n',
        b"DCGM_FI_DEV_GPU_UTIL 40\n",
        b'DCGM_FI_DEV_GPU_UTIL{gpu="0"',
        b'# DCGM_FI_DEV_GPU_UTIL{gpu="0"} 40\n',
        b'DCGM_FI_DEV_GPU_UTIL{gpu="0",GPU_I_PROFILE="1g.10gb",GPU_I_ID="1"} 40\n',
    ],
)
def test_a_page_without_a_gpu_is_refused_in_one_line(body: bytes) -> None:
    with pytest.raises(GpuPageError) as raised:
        read_gpu_page(body)

    assert "no GPU on the page" in str(raised.value)
    assert "\n" not in str(raised.value)


# Against prometheus_client, on pages that it accepts

NAMES = {
    "DCGM_FI_DEV_GPU_UTIL": 100.0,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 1.0,
    "DCGM_FI_PROF_SM_ACTIVE": 1.0,
    "DCGM_FI_DEV_POWER_USAGE": 10_000.0,
    "DCGM_FI_DEV_FB_USED": 16.0 * 2**20,
    "DCGM_FI_DEV_FB_FREE": 16.0 * 2**20,
    "DCGM_FI_DEV_FB_RESERVED": 16.0 * 2**20,
    "DCGM_FI_DEV_GPU_TEMP": 200.0,
    "DCGM_FI_DEV_GPU_UTIL_TOTAL": 100.0,
}
NUMBERS = st.one_of(
    st.floats(0, 1),
    st.integers(0, 100),
    st.floats(0, 200_000),
    st.sampled_from(["NaN", "+Inf", "-Inf", -1, 9223372036854775794, 2147483632, 140737488355328.0, 1e-320]),
)
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from('"\\\n{},= '), max_size=12)


def escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


@st.composite
def pages(draw: st.DrawFn) -> bytes:
    lines: list[str] = []
    for name in draw(st.lists(st.sampled_from(sorted(NAMES)), unique=True, min_size=1)):
        lines += [f"# HELP {name} {draw(st.sampled_from(['x', 'in %.', 'a{gpu=b} 3']))}", f"# TYPE {name} gauge"]
        for gpu in draw(st.lists(st.integers(0, 11), unique=True, max_size=4)):
            pairs = [("gpu", str(gpu)), ("modelName", draw(TEXTS)), ("pod", draw(TEXTS))]
            pairs += [("GPU_I_ID", draw(st.sampled_from(["", "0", "7"])))] * draw(st.integers(0, 1))
            body = ",".join(f'{label}="{escaped(value)}"' for label, value in draw(st.permutations(pairs)))
            lines.append(f"{name}{{{body}}} {draw(NUMBERS)}")
    return "\n".join([*lines, ""]).encode()


def by_prometheus_client(body: bytes) -> dict[tuple[str, int], float]:
    """(family, GPU) → number as the exporter writes it; NaN where it is not to be believed."""
    found: dict[tuple[str, int], float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            if sample.labels.get("GPU_I_ID") or not re.fullmatch("[0-9]{1,4}", sample.labels.get("gpu", "")):
                continue
            believed = 0 <= sample.value <= NAMES[sample.name]
            found[sample.name, int(sample.labels["gpu"])] = sample.value if believed else math.nan
    return found


@costly(max_examples=500)
@given(pages())
def test_it_agrees_with_prometheus_client_on_every_page(body: bytes) -> None:
    theirs = by_prometheus_client(body)
    read = {name for name in NAMES if name not in ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_UTIL_TOTAL")}
    gpus = sorted({gpu for name, gpu in theirs if name in read})

    def of(name: str, gpu: int, otherwise: float = math.nan) -> float:
        return theirs.get((f"DCGM_FI_{name}", gpu), otherwise)

    expected: dict[int, GpuValues] = {}
    for gpu in gpus:
        utilisation = of("DEV_GPU_UTIL", gpu) / 100
        memory = of("DEV_FB_USED", gpu) + of("DEV_FB_FREE", gpu) + of("DEV_FB_RESERVED", gpu, 0.0)
        expected[gpu] = GpuValues(
            of("PROF_GR_ENGINE_ACTIVE", gpu) if math.isnan(utilisation) else utilisation,
            of("PROF_SM_ACTIVE", gpu),
            of("DEV_POWER_USAGE", gpu),
            of("DEV_FB_USED", gpu) / memory if memory > 0 else math.nan,
        )

    if not expected:
        with pytest.raises(GpuPageError):
            read_gpu_page(body)
        return
    reading = read_gpu_page(body)
    assert sorted(reading.gpus) == gpus
    for gpu in gpus:
        assert same(reading.gpus[gpu], expected[gpu]), (gpu, reading.gpus[gpu], expected[gpu])
    refused = [key for key, number in theirs.items() if key[0] in read and math.isnan(number)]
    assert reading.rejected == len(refused)


@costly(max_examples=500)
@given(st.data())
def test_a_damaged_page_gives_sane_numbers_or_is_refused(data: st.DataObject) -> None:
    body = bytearray(FULL)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=8))
        if not body:
            break

    try:
        reading = read_gpu_page(bytes(body))
    except GpuPageError:
        return
    for values in reading.gpus.values():
        for ratio in (values.utilisation_ratio, values.sm_activity_ratio, values.memory_ratio):
            assert math.isnan(ratio) or 0 <= ratio <= 1
        assert math.isnan(values.power_w) or 0 <= values.power_w <= 10_000

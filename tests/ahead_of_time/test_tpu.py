"""`bert-jax compile` with the TPU compiler itself, on this machine without a TPU."""

import json
import re
from pathlib import Path

import pytest
from support import helpers

pytest.importorskip("libtpu", reason="needs the tpu-aot extra")

SMALL = {"global_batch_size": 64, "data.max_predictions": 20}


def run(*arguments: object, config: str = "bert_tiny", expect: int = 0, timeout: int = 280, **overrides: object):
    """`bert-jax compile`, with the compiler's optimizations on; overrides have dots as double underscores."""
    chosen = {**SMALL, **{key.replace("__", "."): value for key, value in overrides.items()}}
    done = helpers.run_cli(
        "compile", f"--config={config}", *arguments, *helpers.flags(chosen), timeout=timeout, XLA_FLAGS=""
    )
    assert done.returncode == expect, done.stderr[-2000:]
    return done


def compiled(*arguments: object, **settings: object) -> dict:
    return json.loads(run("--json", *arguments, **settings).stdout)["phases"][0]


def parameters(hidden: int = 128, layers: int = 2) -> int:
    """With the vocabulary's padding."""
    a_layer = 12 * hidden**2 + 13 * hidden
    heads = 2 * hidden**2 + 4 * hidden + 2 * hidden + 2 + 30_592
    return (30_592 + 512 + 2) * hidden + 2 * hidden + layers * a_layer + heads


def weights(hidden: int = 128, layers: int = 2) -> int:
    """Elements of the matrices of the layers."""
    return 12 * hidden**2 * layers


@pytest.mark.long
def test_data_parallel_sends_one_gradient_and_nothing_in_a_loop():
    found = compiled("--topology=v5e:2x4", gradient_accumulation=2, mesh__zero1=False, model__num_hidden_layers=3)
    assert (found["devices"], found["mesh"], found["rows_per_device"]) == (8, {"data": 8, "fsdp": 1, "tensor": 1}, 4)
    assert {(one["kind"], one["loops"]) for one in found["collectives"]} == {("all-reduce", 0)}
    assert {one["devices"] for one in found["collectives"]} == {8}
    sent = sum(one["bytes"] for one in found["collectives"])
    assert 4 * parameters(layers=3) <= sent <= 4 * parameters(layers=3) + 200  # and scalars
    assert found["fits"]
    assert found["peak_bytes"] < 2**30 < found["hbm_bytes"] == 15.75 * 2**30
    assert found["argument_bytes"] > 3 * 4 * parameters(layers=3)


@pytest.mark.long
def test_a_step_on_all_axes_of_a_mesh_compiles():
    found = compiled("--topology=v5e:2x4", mesh__fsdp=2, mesh__tensor=2)
    assert found["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert any(one["loops"] for one in found["collectives"])  # layers are not unrolled


@pytest.mark.long
def test_gradients_are_sent_in_the_type_that_is_chosen_and_programs_of_v6e_can_be_read():
    found = compiled("--topology=v6e:2x4", gradient_reduce_dtype="bfloat16", mesh__zero1=False)
    (gradients,) = [one for one in found["collectives"] if one["bytes"] > 1000]
    assert gradients["dtype"] == "bf16"
    assert gradients["bytes"] == pytest.approx(2 * parameters(), rel=0.01)


@pytest.mark.long
def test_zero1_scatters_gradients_and_gathers_parameters():
    found = compiled("--topology=v5e:2x4")
    whole = compiled("--topology=v5e:2x4", mesh__zero1=False)
    state = 3 * 4 * parameters()
    assert whole["argument_bytes"] - found["argument_bytes"] == pytest.approx(7 / 8 * state, rel=0.01)
    sent = {kind: sum(one["bytes"] for one in found["collectives"] if one["kind"] == kind) for kind in (
        "all-reduce", "all-gather", "reduce-scatter"
    )}  # fmt: skip
    # Weights move in bfloat16. XLA sends the small table of positions otherwise.
    assert sent["all-gather"] == pytest.approx(4 * parameters() - 2 * weights(), rel=0.02)
    # Small arrays are padded before they are cut.
    assert sent["all-reduce"] + sent["reduce-scatter"] == pytest.approx(4 * parameters(), rel=0.03)


@pytest.mark.long
def test_slices_send_pieces_over_the_network_between_them():
    size = 1024  # with fewer heads XLA pads the gradients of queries, keys and values
    found = compiled("--topology=v5e:2x2", "--num_slices=2", config=f"bert:L2_H{size}")
    assert found["mesh"]["data"] == 8
    between = {kind: sum(one["bytes"] for one in found["collectives"] if one["kind"] == kind and one["between_slices"])
               for kind in ("all-reduce", "all-gather", "reduce-scatter")}  # fmt: skip
    # Of the gradients a device sends its piece, of four in a slice, and of the parameters its shard, of eight.
    assert between["all-reduce"] + between["reduce-scatter"] == pytest.approx(4 * parameters(size) / 4, rel=0.01)
    assert between["all-gather"] == pytest.approx((4 * parameters(size) - 2 * weights(size)) / 8, rel=0.01)


@pytest.mark.long
def test_step_that_does_not_fit_names_the_excess():
    # Its state is too large: to fit activations, XLA would recompute them.
    done = run("--topology=v5e:2x2", config="bert:L12_H8192", expect=2, scan_layers=True)
    line = done.stderr.strip().split("\n")[-1]
    assert re.search(r"need \d+\.\d+ GiB more .* 15\.75 GiB", line)
    assert "remat=attention" in line
    assert re.search("fits +no", done.stdout)


@pytest.mark.long
def test_pallas_attention_keeps_no_probabilities():
    rows, heads, layers, length = 16, 2, 4, 1024  # with more tokens the kernel's peak is in the logits
    plain, kernel = (
        compiled(
            "--topology=v5e:2x2",
            global_batch_size=4 * rows,
            data__seq_len=length,
            attention=attention,
            model__num_hidden_layers=layers,
            model__max_position_embeddings=length,
        )
        for attention in ("xla", "pallas")
    )
    probabilities = 2 * layers * rows * heads * length**2  # bytes in bfloat16
    assert kernel["peak_bytes"] < plain["peak_bytes"] - probabilities


@pytest.mark.long
def test_splash_attention_takes_8192_tokens():
    rows, heads, length = 4, 12, 8_192
    found = compiled(
        "--topology=v5e:2x2", config="modernbert_base", global_batch_size=4 * rows, data__seq_len=length,
        attention="splash", model__num_hidden_layers=4, data__packing=False,
    )  # fmt: skip
    assert found["peak_bytes"] < 2 * rows * heads * length**2  # the probabilities of one global layer


def test_a_topology_that_libtpu_refuses_is_one_line():
    done = run("--topology=v5e:3x3", expect=2)
    (line,) = helpers.error_lines(done.stderr)
    assert line.startswith("bert-jax compile: --topology=v5e:3x3: ")


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_a_step_of_a_thousand_chips_fits_into_the_vector_memory_of_v4():
    found = compiled(
        "--topology=v4:8x8x16", config="bert_large", timeout=900, global_batch_size=16 * 1024,
        model__num_hidden_layers=2,
    )  # fmt: skip
    assert found["fits"]
    assert found["peak_bytes"] < 2**30


def recorded(command: str) -> list[dict]:
    """Rows of a command's phases in the results of benchmarks/tpu_time.py."""
    results = json.loads((Path(__file__).parents[2] / "benchmarks/results/tpu_time.json").read_text())
    rows = [row for row in results["tables"]["topologies"]["rows"] if row["command"] == command]
    assert rows
    return rows


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    "arguments",
    [
        "--config=bert_large --topology=v5e:4x4 --config.global_batch_size=512",
        "--config=bert_large:lamb_v5e --topology=v5e:16x16",
    ],
)
def test_step_is_estimated_at_most_3_percent_above_the_recorded_time_and_memory(arguments: str):
    done = helpers.run_cli("compile", *arguments.split(), "--json", timeout=1800, XLA_FLAGS="")
    assert done.returncode == 0, done.stderr[-2000:]
    for phase, row in zip(json.loads(done.stdout)["phases"], recorded(f"bert-jax compile {arguments}"), strict=True):
        assert 1e3 * phase["estimate"]["seconds"] < 1.03 * row["step_ms"]
        assert phase["peak_bytes"] / 2**30 < 1.03 * row["peak_gib"]


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("topology", ["v5e:4x4", "v5p:2x2x2"])
def test_profile_has_the_parts_of_each_layer_and_gradients_are_reduced_beside_them(topology: str):
    phase = compiled(
        f"--topology={topology}", "--profile", config="bert_large", timeout=900, global_batch_size=512,
        model__num_hidden_layers=4,
    )  # fmt: skip
    reduced = dict.fromkeys((True, False), 0)
    for one in phase["collectives"]:
        reduced[one["asynchronous"]] += one["bytes"] if "reduce" in one["kind"] else 0
    weights_of_layers = 4 * weights(1024, 4)
    assert reduced[True] >= weights_of_layers
    assert reduced[False] <= 1.1 * (4 * parameters(1024, 4) - weights_of_layers)
    parts = phase["estimate"]["parts"]
    assert len(parts) == 40
    assert sum(part["share"] for part in parts) > 0.95
    assert {"forward", "backward", ""} <= {part["direction"] for part in parts}
    products = [part for part in parts if part["operation"].endswith("dot_general")]
    assert 0.5 < sum(part["share"] for part in products) < 0.8
    assert {part["count"] % 4 for part in products if part["module"].startswith("encoder")} == {0}


RATE = """
import sys
import jax
import jax.numpy as jnp
from bert_jax.ahead_of_time.compiled_step import estimate_time, open_target
device = open_target(sys.argv[1]).devices[0]
sharding = jax.sharding.SingleDeviceSharding(device)
arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in ((4096, 4096), (4096, 1024))]
program = jax.jit(jnp.matmul).lower(*arrays).compile().as_text()
print(estimate_time(program, device.device_kind, 2 * 4096 * 4096 * 1024)["mfu"])
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "least"),
    [("v5e:2x2", 0.9), ("v4:2x2x1", 0.75), ("v5p:2x2x1", 0.75), ("v6e:2x2", 0.75), ("tpu7x:2x2x1", 0.6)],
)
def test_clock_gives_a_product_a_plausible_share_of_the_peak(topology: str, least: float):
    assert least < float(helpers.run_python(RATE, topology, XLA_FLAGS="").split()[-1]) < 1


SHARDED_STATE = """
import jax
from bert_jax.ahead_of_time.compiled_step import open_target
from bert_jax.config import load_config
from bert_jax.model import BertConfig
from bert_jax.training.pretrain import plan_state
from bert_jax.training.train_step import key_data
from bert_jax.parallel.mesh import make_mesh
from bert_jax.sections import to_dict
target = open_target("v5e:4x4")
config = load_config("bert_large", [("mesh.data", "1"), ("mesh.fsdp", "-1")])
mesh = make_mesh(config.mesh, target.devices)
_, spec = plan_state(mesh, config, BertConfig.from_dict({**to_dict(config.model), "vocab_size": 30_522}))
sizes = spec.initialize.lower(key_data(0), None).compile().memory_analysis()
print(sum(leaf.size * 4 for leaf in jax.tree.leaves(spec.abstract)), sizes.peak_memory_in_bytes)
"""


@pytest.mark.long
def test_no_device_ever_holds_the_whole_of_a_large_model_that_is_cut():
    """Each of 16 devices initializes only its own shard; a restored state has the same shardings."""
    whole, peak = map(int, helpers.run_python(SHARDED_STATE, XLA_FLAGS="").split()[-2:])
    assert whole > 4 * 10**9
    assert peak < whole / 8


@pytest.mark.long
def test_memory_does_not_grow_with_the_chips():
    few, many = (
        compiled(f"--topology={shape}", config="bert_large", global_batch_size=32 * chips, model__num_hidden_layers=4)
        for shape, chips in (("v5e:4x4", 16), ("v5e:8x16", 128))
    )
    assert many["devices"] == 128  # which divides all tables, the padded vocabulary among them
    # The peak, which has to fit: XLA's temporaries alone grow as the shards of the state, its arguments, shrink.
    assert many["peak_bytes"] < 1.02 * few["peak_bytes"]
    assert sum(one["bytes"] for one in many["collectives"]) == pytest.approx(
        sum(one["bytes"] for one in few["collectives"]),
        rel=0.005,  # small arrays are padded before they are cut
    )

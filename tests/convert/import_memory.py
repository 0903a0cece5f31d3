"""Peak host memory of the import of a random checkpoint: `python tests/convert/import_memory.py [--parameters 5e8]`.

Prints the peak, minus that of a process that only imports jax, relative to the size of the float32 parameters.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

WIDTH, HEAD_DIM = 896, 64
PRINT_PEAK = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"


def write_checkpoint(directory: Path, depth: int, vocabulary: int, dtype: str) -> int:
    """Writes a Qwen2 checkpoint in shards; returns its parameters."""
    import ml_dtypes  # noqa: F401 (NumPy's bfloat16)

    mlp_width, kv_width = 4864, 2 * HEAD_DIM
    layer = {
        "input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,),
        "self_attn.q_proj.weight": (WIDTH, WIDTH), "self_attn.q_proj.bias": (WIDTH,),
        "self_attn.k_proj.weight": (kv_width, WIDTH), "self_attn.k_proj.bias": (kv_width,),
        "self_attn.v_proj.weight": (kv_width, WIDTH), "self_attn.v_proj.bias": (kv_width,),
        "self_attn.o_proj.weight": (WIDTH, WIDTH), "mlp.gate_proj.weight": (mlp_width, WIDTH),
        "mlp.up_proj.weight": (mlp_width, WIDTH), "mlp.down_proj.weight": (WIDTH, mlp_width),
    }  # fmt: skip
    shards = [{"model.embed_tokens.weight": (vocabulary, WIDTH), "model.norm.weight": (WIDTH,)}]
    shards += [{f"model.layers.{n}.{name}": shape for name, shape in layer.items()} for n in range(depth)]
    rng, names, count = np.random.default_rng(0), {}, 0
    for number, shard in enumerate(shards):
        file = f"model-{number:05}.safetensors"
        tensors = {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shard.items()}
        save_file(tensors, directory / file)
        names |= dict.fromkeys(shard, file)
        count += sum(math.prod(shape) for shape in shard.values())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    config = {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": WIDTH, "num_hidden_layers": depth,
        "num_attention_heads": WIDTH // HEAD_DIM, "num_key_value_heads": 2, "intermediate_size": mlp_width,
        "vocab_size": vocabulary, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return count


def _output(*command: str, cwd: Path | None = None) -> str:
    return subprocess.run([sys.executable, *command], check=True, cwd=cwd, stdout=subprocess.PIPE, text=True).stdout


def measure(parameters: float, dtype: str) -> float:
    """Prints the figures; returns the peak relative to the float32 size."""
    depth, vocabulary = max(round(parameters / 2e7), 1), int(parameters / 3.3e3)
    here, root = Path(__file__), Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as name:
        # In a process of its own, because a child's peak is at least what its parent has when it is started.
        write = (
            f"from import_memory import *; print(write_checkpoint(Path({name!r}), {depth}, {vocabulary}, {dtype!r}))"
        )
        count = int(_output("-c", write, cwd=here.parent))
        bare = int(_output("-c", f"import jax; jax.devices(); {PRINT_PEAK}"))
        start = time.perf_counter()
        run = f"sys.argv = ['import_hf.py', {name!r}, '--out', {name + '/run'!r}]; main(); {PRINT_PEAK}"
        peak = int(_output("-c", f"import sys; from import_hf import main; {run}", cwd=root / "scripts").split()[-1])
        seconds = time.perf_counter() - start
    ratio = (peak - bare) * 1024 / (4 * count)
    print(
        f"{count:,} parameters in {dtype}: peak {peak / 2**20:.2f} GiB, {bare / 2**20:.2f} of it for jax; the rest is "
        f"{ratio:.3f} times the float32 size; {seconds:.0f} s"
    )
    return ratio


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", type=float, default=5e8)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    options = parser.parse_args()
    measure(options.parameters, options.dtype)

"""Reference implementations of the baseline mixers, in float64 NumPy, by loops over sublayers and tokens.

They use neither JAX nor the package. Each is `(embedding [T, D], layers, ends, functions) -> [T, D]`, the input of the
model's final norm. `layers` is a list of the parameters of each sublayer, `ends` are those of the ends, and `functions`
are the sublayers, for one token.
"""

import numpy as np


def rms(x):
    return np.sqrt(np.mean(x * x) + 1e-6)


def softmax(scores):
    weights = np.exp(np.array(scores) - np.max(scores))
    return weights / weights.sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def attend(sources, parameters):
    scores = [float(np.dot(parameters["query"], parameters["gain"] * v / rms(v))) for v in sources]
    return sum(a * v for a, v in zip(softmax(scores), sources, strict=True))


def preln(embedding, layers, ends, functions):
    def token(h):
        for f in functions:
            h = h + f(h)
        return h

    return np.stack([token(h) for h in embedding])


def attnres(embedding, layers, ends, functions):
    def token(v):
        sources = [v]
        for layer, f in zip(layers, functions, strict=True):
            sources.append(f(attend(sources, layer["attention"])))
        return attend(sources, ends["attention"])

    return np.stack([token(v) for v in embedding])


def block_sources(sublayers, block_size):
    """The sources of every read: for each source the outputs that it is the sum of. Output 0 is the embedding."""
    sources = []
    for reader in range(1, sublayers + 2):
        written = list(range(1, reader))
        blocks = [written[i : i + block_size] for i in range(0, len(written), block_size)]
        sources.append([[0], *blocks])
    return sources


def attnres_block(embedding, layers, ends, functions, block_size):
    readers = [*layers, ends]

    def token(v):
        outputs = [v]
        for reader, sources, f in zip(
            readers, block_sources(len(functions), block_size), [*functions, lambda x: x], strict=True
        ):
            outputs.append(f(attend([sum(outputs[i] for i in source) for source in sources], reader["attention"])))
        return outputs[-1]

    return np.stack([token(v) for v in embedding])


def layer_norm(x, scale, bias):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-6) * scale + bias


def hyper(embedding, layers, ends, functions, streams):
    def token(v):
        H = [v.copy() for _ in range(streams)]
        for layer, f in zip(layers, functions, strict=True):
            B = [float(b) for b in layer["write_to"]]
            A_m = [float(a) for a in layer["read_from"]]
            A_r = [[float(a) for a in row] for row in layer["carry"]]
            if "dynamic" in layer:
                p = layer["dynamic"]
                for i in range(streams):
                    x = layer_norm(H[i], p["norm"]["scale"], p["norm"]["bias"])
                    B[i] += p["write_scale"] * np.tanh(x @ p["write_to"])
                    A_m[i] += p["carry_scale"] * np.tanh(x @ p["read_from"])
                    for j in range(streams):
                        A_r[i][j] += p["carry_scale"] * np.tanh(x @ p["carry"][:, j])
            o = f(sum(A_m[i] * H[i] for i in range(streams)))
            H = [B[j] * o + sum(A_r[i][j] * H[i] for i in range(streams)) for j in range(streams)]
        return sum(H)

    return np.stack([token(v) for v in embedding])


def sinkhorn(logits, rounds=20):
    matrix = np.exp(logits)
    n = len(matrix)
    for _ in range(rounds):
        for j in range(n):
            matrix[:, j] /= matrix[:, j].sum()
        for i in range(n):
            matrix[i, :] /= matrix[i, :].sum()
    return matrix


def mhc(embedding, layers, ends, functions, streams):
    n = streams

    def token(v):
        x = [v.copy() for _ in range(n)]
        for layer, f in zip(layers, functions, strict=True):
            flat = np.concatenate(x)
            product = (flat / rms(flat)) @ layer["phi"]
            pre = sigmoid(layer["scale"][0] * product[:n] + layer["bias"][:n])
            post = 2 * sigmoid(layer["scale"][1] * product[n : 2 * n] + layer["bias"][n : 2 * n])
            res = sinkhorn((layer["scale"][2] * product[2 * n :] + layer["bias"][2 * n :]).reshape(n, n))
            o = f(sum(pre[i] * x[i] for i in range(n)))
            x = [sum(res[i, j] * x[j] for j in range(n)) + post[i] * o for i in range(n)]
        return sum(x)

    return np.stack([token(v) for v in embedding])


def denseformer(embedding, layers, ends, functions, dilation, period):
    def token(v):
        h, outputs = v, [v]
        for index, (layer, f) in enumerate(zip(layers, functions, strict=True)):
            h = h + f(h)
            if index % 2 == 1:  # the end of a block
                outputs.append(h)
                i = len(outputs) - 1
                if i % period == 0:
                    h = sum(layer["weights"][j] * outputs[j] for j in range(i + 1) if (i - j) % dilation == 0)
        return h

    return np.stack([token(v) for v in embedding])

"""Attention and its gradients of a folder that `dump` has written, in float64, straight from the textbook: for check_dump."""
import json
import os

import numpy as np


class Unusable(Exception):
    pass


def bf16(x):
    """Rounded to bfloat16: the upper half of a float32, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def fp16(x):
    return np.asarray(x, np.float64).astype(np.float16).astype(np.float64)


def exact(x):
    return x


def alibi_slopes(heads):
    """Press et al. 2021: a geometric series; heads beyond a power of two take every other one of the next series."""
    power = 1 << (heads.bit_length() - 1)
    series = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    finer = [2.0 ** (-8.0 * (i + 1) / (2 * power)) for i in range(2 * power)]
    return np.array(series + finer[::2][: heads - power], np.float32).astype(np.float64)


class Steps:
    """What is rounded between the products of attention, and of the results: all as `store` does, in the tensors' own dtype."""

    def __init__(self, store):
        self.store = store
        self.forward_store = store
        self.amax_ds = 0.0
        self.totals = {}

    def weights(self, weights, factor):
        """P for its product with v, from exp(logits - maximum) and what normalises it."""
        return self.store(weights * factor[:, None])

    def total_of_lse(self, place, of_lse, again):
        """What normalises P of a backward pass whose logits are of other operands than those that lse is of: the sum that lse is of."""
        self.totals[place] = of_lse, again
        return of_lse

    def normalised(self, prob):
        """P of the backward pass, for dS and for dv."""
        prob = self.store(prob)
        return prob, prob

    def gradient(self, ds, chunks):
        """The gradient of the scaled logits, for dq and for dk."""
        self.amax_ds = max(self.amax_ds, np.abs(ds).max(initial=0.0))
        return ds, ds

    def store_results(self, results):
        for name in ("out", "dq", "dk", "dv", "dbias"):
            if name in results:
                results[name] = self.store(results[name])


def read_index(folder):
    try:
        with open(os.path.join(folder, "index.json")) as f:
            return json.load(f)
    except (OSError, ValueError) as error:
        raise Unusable(f"{folder}: no index.json that can be read: {error}")


class Case:
    other_logits_backward = False  # the backward pass makes its logits of other operands than the forward pass
    logit_error = 1e-4  # of fp32 sums of exact products

    def __init__(self, folder, index):
        self.oracles = None
        self.files = index["files"]
        p = self.params = index["parameters"]
        self.lengths = {s: np.diff(index[f"cu_seqlens_{s}"]) for s in ("q", "kv")}
        self.cumulated = {s: index[f"cu_seqlens_{s}_padded"] for s in ("q", "kv")}
        self.begins = {s: places[:-1] for s, places in self.cumulated.items()}
        self.world_size = index["world_size"]
        self.heads, self.kv_heads = p["num_heads"], p["num_gqa_groups"]
        self.training = p["is_training"]
        self.round = {"bf16": bf16, "fp16": fp16, "fp8": bf16}[p["dtype"]]
        self.unit = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-8}[p["dtype"]]
        self.tensors = {}
        for name, about in self.files.items():
            array = np.load(os.path.join(folder, name), allow_pickle=False)
            if list(array.shape) != about["shape"] or str(array.dtype) != about["dtype"]:
                raise Unusable(f"{name} is {array.dtype} {array.shape}, and index.json says another thing")
            self.tensors[name] = array
        needed = ["q", "k", "v", "out", "lse"] + (["dout", "dq", "dk", "dv"] if self.training else [])
        if p["attn_bias_type"] == "post_scale_bias":
            needed += ["bias"] + (["dbias"] if self.training else [])
        if p["softmax_type"] == "learnable":
            needed += ["softmax_offset"] + (["d_softmax_offset"] if self.training else [])
        if p["return_max_logit"]:
            needed += ["max_logit"]
        missing = [name for name in needed if name + ".npy" not in self.files]
        if missing:
            raise Unusable(f"{folder}: index.json has no {', '.join(missing)}")

    def side(self, name):
        return "q" if name in ("q", "dout", "out", "out_no_cp", "lse", "dq") else "kv"

    def tokens(self, array, name, sequence):
        """The tokens of one sequence, [length, ...]: a view."""
        side = self.side(name)
        length = self.lengths[side][sequence]
        layout = self.params["qkv_format"]
        if layout == "thd":
            begin = self.begins[side][sequence]
            return array[begin : begin + length]
        return array[sequence, :length] if layout == "bshd" else array[:length, sequence]

    def chunk(self, side, sequence):
        """How many tokens in a row a rank holds of a sequence's places."""
        room = np.diff(self.cumulated[side])[sequence]
        return max(1, room // (2 * self.world_size))

    def operand(self, product, name, sequence):
        """What a product reads of a tensor: here the tensor itself, whatever the product."""
        return self.tokens(self.tensors[name + ".npy"], name, sequence)

    def delta(self, prob, dprob, sequence, head):
        return (prob * dprob).sum(axis=1)

    def visible(self, lq, lkv):
        """Which keys a query sees, and the key that it stands on."""
        mask = self.params["attn_mask_type"]
        left, right = self.params["window_size"]
        i, j = np.arange(lq)[:, None], np.arange(lkv)[None, :]
        own = i if mask in ("causal", "padding_causal") else i + (lkv - lq)
        if "causal" in mask:
            right = 0
        seen = np.ones((lq, lkv), bool)
        if left >= 0:
            seen &= j >= own - left
        if right >= 0:
            seen &= j <= own + right
        return seen, j - own

    def empty_results(self):
        shapes = {n: self.tensors[n + ".npy"].shape for n in ("out", "lse")}
        if self.training:
            for name in ("dq", "dk", "dv", "dbias", "d_softmax_offset"):
                if name + ".npy" in self.tensors:
                    shapes[name] = self.tensors[name + ".npy"].shape
        results = {name: np.zeros(shape) for name, shape in shapes.items()}
        if "max_logit.npy" in self.tensors:
            results["max_logit"] = np.full(self.heads, -np.inf)
        return results

    def logits(self, store, q, k, sequence, head, seen, distance):
        """Scaled, biased and masked, and where the bias has them."""
        p = self.params
        logits = store(q @ k.T * p["softmax_scale"])
        if p["attn_bias_type"] == "alibi":
            logits = store(logits - alibi_slopes(self.heads)[head] * np.abs(distance))
        place = None
        if p["attn_bias_type"] == "post_scale_bias":
            bias = self.tensors["bias.npy"]
            b, n, m, _ = bias.shape
            place = (sequence if b > 1 else 0, head if n > 1 else 0, slice(0, len(q)) if m > 1 else slice(0, 1), slice(0, len(k)))
            logits = store(logits + bias[place].astype(np.float64))
        return np.where(seen, logits, -np.inf), place

    def compute(self, steps):
        """All outputs, padding 0."""
        p, group = self.params, self.heads // self.kv_heads
        results = self.empty_results()
        for s in range(p["batch_size"]):
            seen, distance = self.visible(self.lengths["q"][s], self.lengths["kv"][s])
            chunks = self.chunk("q", s), self.chunk("kv", s)
            for h in range(self.heads):
                g = h // group
                take = lambda product, name: self.operand(product, name, s)[:, g if name in "kv" else h].astype(np.float64)
                logits, place = self.logits(steps.forward_store, take("logits", "q"), take("logits", "k"), s, h, seen, distance)
                largest = logits.max(axis=1, initial=-np.inf)
                if "max_logit" in results and len(largest):
                    results["max_logit"][h] = max(results["max_logit"][h], largest.max())
                shift = np.where(np.isfinite(largest), largest, 0.0)
                weights = np.exp(logits - shift[:, None])
                total = weights.sum(axis=1)
                with np.errstate(divide="ignore"):
                    self.tokens(results["lse"], "lse", s)[:, h] = np.log(total) + shift
                sink, top = np.zeros(len(shift)), shift
                if p["softmax_type"] != "vanilla":
                    offset = 0.0
                    if p["softmax_type"] == "learnable":
                        offset = float(self.tensors["softmax_offset.npy"][h])
                    top = np.maximum(shift, offset)  # neither exponential overflows
                    sink = np.exp(offset - top)
                    total = total * np.exp(shift - top) + sink
                inverse = np.where(total > 0, 1.0 / np.where(total > 0, total, 1.0), 0.0)
                factor = np.exp(shift - top) * inverse
                self.tokens(results["out"], "out", s)[:, h] = steps.weights(weights, factor) @ take("out", "v")
                if not self.training:
                    continue
                prob = weights * factor[:, None]
                if self.other_logits_backward:
                    logits, _ = self.logits(steps.store, take("logits again", "q"), take("logits again", "k"), s, h, seen, distance)
                    weights = np.exp(logits - top[:, None])
                    total = steps.total_of_lse((s, h), total - sink, weights.sum(axis=1)) + sink
                    inverse = np.where(total > 0, 1.0 / np.where(total > 0, total, 1.0), 0.0)
                    prob = weights * inverse[:, None]
                prob, prob_for_dv = steps.normalised(prob)
                dprob = steps.store(take("dprob", "dout") @ take("dprob", "v").T)
                delta = self.delta(prob, dprob, s, h)
                dlogits = steps.store(prob * (dprob - delta[:, None]))
                for_dq, for_dk = steps.gradient(dlogits * p["softmax_scale"], chunks)
                self.tokens(results["dq"], "dq", s)[:, h] = for_dq @ take("dq", "k")
                self.tokens(results["dk"], "dk", s)[:, g] += for_dk.T @ take("dk", "q")
                self.tokens(results["dv"], "dv", s)[:, g] += prob_for_dv.T @ take("dv", "dout")
                if place is not None:
                    gradient = dlogits if results["dbias"].shape[2] > 1 else dlogits.sum(axis=0, keepdims=True)
                    results["dbias"][place] += gradient
                if "d_softmax_offset" in results:
                    results["d_softmax_offset"][h] -= (sink * inverse * delta).sum()
        steps.store_results(results)
        return results

    def padding(self, name):
        """Which rows of a tensor of tokens hold none."""
        array = self.tensors[name + ".npy"]
        rows = array.shape[:1] if self.params["qkv_format"] == "thd" else array.shape[:2]
        held = np.zeros(rows, bool)
        for s in range(self.params["batch_size"]):
            self.tokens(held, name, s)[...] = True
        return ~held

    def oracle(self, run):
        """The outputs that are right for a run, "cp" or "no_cp", and those of plain attention: of both runs the same."""
        if self.oracles is None:
            self.oracles = self.compute(Steps(exact)), self.compute(Steps(self.round))
        return self.oracles

    def check_casts(self):
        return []

    def wrong_statistics(self, name, given, right, plain):
        return None, ""

    def tolerance(self, name, right, plain):
        finite = np.isfinite(right)
        largest = np.abs(right[finite]).max(initial=0.0)
        if name in ("lse", "max_logit"):
            return self.logit_error * max(1.0, largest)
        error = np.abs(plain[finite] - right[finite]).max(initial=0.0)
        return (2 if name == "out" else 3) * error + self.unit * largest + (0 if name == "out" else 1e-5)

#!/usr/bin/env python3
"""scripts/check_dump on dumps of dtype fp8 that are made here, in NumPy: those of right casts pass, and each planted error fails.

    fp8_dump_test.py CHECK_DUMP FOLDER

Casts are made of float32's bits and not by check_dump's search of a format's values, and scales are applied in float32."""
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import sys

import numpy as np

B, S, H, G, D, V = 1, 128, 8, 4, 64, 64  # 65536 elements of q: as many as statistics need


def cast(x, fraction, bias, largest, nearest):
    """The float32 numbers of an 8-bit format that are nearest, ties to even, saturating."""
    x = np.asarray(x, np.float32)
    exponent = np.maximum(np.frexp(x)[1] - 1, 1 - bias)
    step = np.ldexp(np.float32(1), exponent - fraction)
    return np.clip(nearest(x / step) * step, -largest, largest)


def e4m3(x, nearest=np.rint):
    return cast(x, 3, 7, 448, nearest)


def e5m2(x):
    return cast(x, 2, 15, 57344, np.rint)


def payload(values, fraction, bias):
    """The bytes of numbers that are in the format."""
    values = np.asarray(values, np.float64)
    mantissa, exponent = np.frexp(np.abs(values))
    field = exponent - 1 + bias
    normal = (field << fraction) + np.rint((2 * mantissa - 1) * 2**fraction).astype(int)
    tiny = np.rint(np.abs(values) * 2.0 ** (bias - 1 + fraction)).astype(int)
    code = np.where((values == 0) | (field < 1), tiny, normal)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def bf16(x):
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def scaled(x, amax, e5=False):
    """A tensor by one scale: what it stores, the inverse of the scale, and what it reads as."""
    scale = np.float32(57344 if e5 else 448) / np.float32(amax)
    stored = (e5m2 if e5 else e4m3)(np.asarray(x, np.float32) * scale)
    inverse = np.float32(1) / scale
    return stored, inverse, stored.astype(np.float64) * np.float64(inverse)


def blocks(x, axis):
    """A tensor in blocks of 32: what it stores, the exponents, and what it reads as."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    parts = x.reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(parts).max(axis=-1)
    exponent = np.ceil(np.log2(amax / 448)).astype(int)
    stored = e4m3(parts / 2.0 ** exponent[..., None])
    read = stored * 2.0 ** exponent[..., None]
    back = lambda a: np.moveaxis(a.reshape(x.shape), -1, axis)
    return back(stored), np.moveaxis(exponent + 127, -1, axis).astype(np.uint8), back(read)


def attend(mode, mha, bwd, f16_o, bugs=()):
    """The tensors of a dump: causal attention with these casts."""
    random = np.random.default_rng(7)
    # Logits of a 16-bit backward pass are large, so that operands that are rounded once more have another lse.
    x = {n: bf16(random.uniform(-1, 1, (B, S, h, d)) * a)
         for n, h, d, a in (("q", H, D, 1), ("k", G, D, 4 if bwd else 128), ("v", G, V, 0.25), ("dout", H, V, 0.5))}
    files = {}
    mx, amax = mode == "mxfp8", max(np.abs(x[n]).max() for n in "qkv")

    def store(name, stored, scale, e5=False, suffix=""):
        files[f"{name}_payload{suffix}"] = payload(stored, *((2, 15) if e5 else (3, 7)))
        files[f"{name}_scale_e8m0{suffix}" if mx else f"{name}_scale_inv"] = scale if mx else np.array([scale], np.float32)

    read = {}
    for name in ("q", "k", "v") + (("dout",) if bwd else ()):
        if not mx:
            stored, inverse, read[name] = scaled(x[name], amax if name != "dout" else np.abs(x[name]).max(), name == "dout")
            store(name, stored, inverse, name == "dout")
            if mha:
                x[name] = bf16(read[name])
            continue
        for suffix, axis in ("_rows", -1), ("_columns", 1):
            stored, exponents, read[name + suffix] = blocks(x[name], axis)
            if "neighbour" in bugs and name == "k" and suffix == "_rows":
                exponents = np.roll(exponents, 1, axis=1)
            store(name, stored, exponents, suffix=suffix)

    def take(name, suffix=""):
        array = read[name + suffix] if mx else read[name]
        return np.repeat(array, H // G, axis=2)[0] if name in "kv" else array[0]

    scale, p_scale = D**-0.5, 256 if mx else 448
    seen = np.tril(np.ones((S, S), bool))
    rows, columns = ("_rows", "_columns") if mx else ("", "")
    logits = np.einsum("qhd,khd->hqk", take("q", rows), take("k", rows)) * scale
    logits = np.where(seen, logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    nearest = np.floor if "truncated" in bugs else np.rint
    kept = weights if "p not cast" in bugs else e4m3(weights * np.float32(p_scale), nearest).astype(np.float64) / p_scale
    out = np.einsum("hqk,khd->qhd", kept / total, take("v", columns))
    files["lse"] = (np.log(total) + top)[..., 0].T[None].astype(np.float32)
    out_of_delta = bf16(out)
    if mode == "delayed" or (mode == "current" and (mha or not f16_o)):
        stored, inverse, fp8_out = scaled(bf16(out) if mode == "current" else out, np.abs(out).max())
        if mode == "delayed" or mha:
            out = fp8_out
            store("out", stored[None], inverse)
        if bwd and not (mode == "current" and f16_o):
            out_of_delta = fp8_out
    files["out"] = bf16(out)[None]
    if mode == "current" and mha and (f16_o or not bwd):
        files["out_f16"] = out_of_delta[None]
    if not bwd:
        q, k, v = (bf16(read[n]) for n in (("q_rows", "k_rows", "v_columns") if mx else "qkv"))
        read.update(q=q, k=k, v=v, dout=x["dout"])
        take = lambda name, suffix="": (np.repeat(read[name], H // G, axis=2) if name in "kv" else read[name])[0].astype(np.float64)
        logits = np.where(seen, np.einsum("qhd,khd->hqk", take("q"), take("k")) * scale, -np.inf)
        if mode == "delayed":
            out_of_delta = fp8_out
    if "lse of its own" in bugs:
        total = np.exp(logits - top).sum(axis=-1, keepdims=True)
    prob = np.exp(logits - top) / total
    dprob = np.einsum("qhd,khd->hqk", take("dout", rows), take("v", rows))
    delta = (out_of_delta.astype(np.float64) * (x["dout"][0] if mx or not bwd else take("dout"))).sum(axis=-1).T
    ds = prob * (dprob - delta[..., None]) * scale
    for_dq = for_dk = ds
    if bwd and mx:
        for_dq, for_dk = blocks_of(ds, -1), blocks_of(ds, -2)
    elif bwd:
        for_dq = for_dk = scaled(ds, np.abs(ds).max(), True)[2]
    if bwd and "p not cast" not in bugs:
        prob = e4m3(prob * np.float32(p_scale)).astype(np.float64) / p_scale
    gradients = {"dq": np.einsum("hqk,khd->qhd", for_dq, take("k", columns)),
                 "dk": np.einsum("hqk,qhd->khd", for_dk, take("q", columns)).reshape(S, G, H // G, D).sum(axis=2),
                 "dv": np.einsum("hqk,qhd->khd", prob, take("dout", columns)).reshape(S, G, H // G, V).sum(axis=2)}
    largest = max(np.abs(g).max() for g in gradients.values())
    for name, gradient in gradients.items():
        if "one scale twice" in bugs and name == "dq":
            gradient = gradient * 1.1
        if bwd and (mode == "delayed" or (mode == "current" and mha)):
            stored, inverse, gradient = scaled(gradient, largest, True)
            store(name, stored[None], inverse, True)
        files[name] = bf16(gradient)[None]
    if {"lse off", "lse off, native"} & set(bugs):
        files["lse"] = files["lse"] + np.float32(3e-4) * np.abs(files["lse"]).max()
    if "dk zero" in bugs:
        files["dk"] *= 0
        files.pop("dk_payload", None)
    files.update(x)
    if "another scale" in bugs:
        files["k_scale_inv"] = files["k_scale_inv"] * np.float32(1.03)
    if "one byte" in bugs:
        name = "q_payload" if not mx else "q_payload_columns"
        files[name][0, 5, 1, 7] ^= 1
    return files


def blocks_of(ds, axis):
    """dS in blocks of 32 positions. A block without a visible pair is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = np.moveaxis(ds, axis, -1).reshape(*np.moveaxis(ds, axis, -1).shape[:-1], -1, 32)
        amax = np.abs(moved).max(axis=-1, keepdims=True)
        scale = 2.0 ** np.where(amax > 0, np.ceil(np.log2(amax / 448)), 0)
    read = e4m3(moved / scale) * scale
    return np.moveaxis(read.reshape(np.moveaxis(ds, axis, -1).shape), -1, axis)


def dump(folder, mode, mha, bwd, f16_o, bugs=()):
    os.makedirs(folder, exist_ok=True)
    files = attend(mode, mha, bwd, f16_o, bugs)
    index = {"world_size": 2, "files": {}, "kernels": {"fp8_products": "native" if "lse off, native" in bugs else "bf16"}, "parameters": {
        "batch_size": B, "max_seqlen_q": S, "max_seqlen_kv": S, "num_heads": H, "num_gqa_groups": G, "head_dim_qk": D,
        "head_dim_v": V, "dtype": "fp8", "scaling_mode": mode, "fp8_dpa": True, "fp8_mha": mha, "fp8_bwd": bwd, "f16_O": f16_o,
        "qkv_format": "bshd", "attn_mask_type": "causal", "window_size": [-1, 0], "attn_bias_type": "no_bias",
        "softmax_type": "vanilla", "return_max_logit": False, "is_training": True, "softmax_scale": D**-0.5}}
    for name in ("q", "kv"):
        index["cu_seqlens_" + name] = index[f"cu_seqlens_{name}_padded"] = [0, S]
    for name, array in files.items():
        np.save(os.path.join(folder, name + ".npy"), array)
        index["files"][name + ".npy"] = {"tensor": name, "run": "cp", "shape": list(array.shape), "dtype": str(array.dtype)}
    with open(os.path.join(folder, "index.json"), "w") as file:
        json.dump(index, file)


RECIPES = [("delayed", False, True, False), ("delayed", True, True, False), ("delayed", False, False, False),
           ("current", False, True, False), ("current", False, True, True), ("current", True, True, True),
           ("current", True, False, True), ("mxfp8", False, True, True), ("mxfp8", False, False, True)]
CURRENT, MX = ("current", False, True, True), ("mxfp8", False, True, True)
PLANTED = [(CURRENT, "p not cast", "out", "too small"), (MX, "p not cast", "out", "too small"),
           (CURRENT, "truncated", "out", ""), (CURRENT, "one scale twice", "dq", "gain"),
           (CURRENT, "dk zero", "dk", ""), (CURRENT, "lse off", "lse", "too far"), (CURRENT, "lse off, native", None, None), (CURRENT, "another scale", "k_payload", "not the nearest"),
           (CURRENT, "one byte", "q_payload", "1 of 65536 elements are not the nearest"),
           (("current", False, False, False), "lse of its own", "dv", "too far"), (("delayed", False, False, False), "lse of its own", "dv", "too far"),
           (MX, "one byte", "q_payload_columns", "not the nearest"), (MX, "neighbour", "k_payload_rows", "not the nearest")]


def main():
    path, folder = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(path))
    loader = importlib.machinery.SourceFileLoader("check_dump", path)
    check_dump = importlib.util.module_from_spec(importlib.util.spec_from_loader("check_dump", loader))
    sys.dont_write_bytecode = True
    loader.exec_module(check_dump)
    wrong = 0
    for recipe, bug, tensor, text in [(recipe, None, None, None) for recipe in RECIPES] + PLANTED:
        dump(folder, *recipe, [bug] if bug else [])
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = check_dump.main([folder])
        lines = [line for line in output.getvalue().splitlines() if line.startswith("FAILED")]
        right = code == 0 if not tensor else code == 1 and any(line.split()[1] == tensor and text in line for line in lines)
        if not right:
            wrong += 1
            print(f"{recipe} with {bug}: exit code {code}\n{output.getvalue()}")
        for name in os.listdir(folder):
            os.remove(os.path.join(folder, name))
    print(f"{wrong} of {len(RECIPES) + len(PLANTED)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The same for dtype fp8: what payloads and scales mean, and casts by a search of each format's values.

E4M3 and E5M2 are those of "FP8 Formats for Deep Learning" (Micikevicius et al. 2022); E8M0, and its blocks of 32, those of
"OCP Microscaling Formats" 1.0. Arrays are float64, which holds every value exactly."""
import numpy as np

from dump_attention import Case, Steps, Unusable, bf16, exact

BLOCK = 32


class Format:
    """`fraction` bits of fraction, exponents biased by `bias`, and the byte of the largest finite value."""

    def __init__(self, name, fraction, bias, largest):
        self.name = name
        codes = np.arange(largest + 1)
        exponent, part = codes >> fraction, (codes & ((1 << fraction) - 1)) / (1 << fraction)
        self.values = np.where(exponent > 0, 2.0 ** (exponent - bias) * (1 + part), 2.0 ** (1 - bias) * part)
        self.middles = (self.values[1:] + self.values[:-1]) / 2
        self.largest = self.values[-1]

    def decode(self, payload):
        """Bytes to values. What is beyond the largest finite value is NaN: a cast that saturates makes none."""
        table = np.full(128, np.nan)
        table[: len(self.values)] = self.values
        return np.where(payload & 0x80, -1.0, 1.0) * table[payload & 0x7F]

    def encode(self, x):
        """Values to bytes: to nearest, ties to the even byte, saturating."""
        magnitude = np.abs(x)
        code = np.searchsorted(self.middles, magnitude, side="left")  # ties go down
        tie = code < len(self.middles)
        tie &= self.middles[np.minimum(code, len(self.middles) - 1)] == magnitude
        code = code + (tie & (code % 2 == 1))
        return np.where(np.isnan(x), 0x7F, code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)

    def round(self, x):
        return self.decode(self.encode(x))


E4M3 = Format("E4M3", 3, 7, 0x7E)
E5M2 = Format("E5M2", 2, 15, 0x7B)


def decode_e8m0(exponents):
    return 2.0 ** (exponents.astype(np.float64) - 127)


def scale_of(form, amax):
    """The scale of a tensor: largest / amax in float32; 1 where that is not possible."""
    amax = np.float32(amax)
    if not 0 < amax < np.inf:
        return 1.0
    with np.errstate(over="ignore"):
        scale = np.float32(form.largest) / amax
    return float(min(scale, np.finfo(np.float32).max))


def cast(form, x, scale):
    """x as a payload with this scale reads again."""
    return form.round((np.float32(x) * np.float32(scale)).astype(np.float64)) / scale


def cast_by_amax(form, x):
    return cast(form, x, scale_of(form, np.abs(x).max(initial=0.0)))


def block_scale(amax):
    """The smallest power of two with which `amax` fits into E4M3."""
    mantissa, exponent = np.frexp(amax / E4M3.largest)  # mantissa from 0.5 on
    return 2.0 ** np.clip(np.where(amax > 0, exponent - (mantissa == 0.5), -127), -127, 127)


def cast_blocks(x, axis, starts):
    """x as E4M3 with a power of two for each block along `axis`. `starts`: where blocks begin, 0 first."""
    if x.shape[axis] == 0:
        return x
    amax = np.maximum.reduceat(np.abs(x), starts, axis=axis)
    scale = np.repeat(block_scale(amax), np.diff(starts + [x.shape[axis]]), axis=axis)
    return E4M3.round(x / scale) * scale


def block_starts(length, chunk):
    """Where blocks of at most 32 of `length` elements begin. None crosses a multiple of `chunk`."""
    return [b for c in range(0, length, chunk) for b in range(c, min(c + chunk, length), BLOCK)]


class Fp8Steps(Steps):
    """Plain attention of dtype fp8. `right`: the steps without rounding, whose amaxes the scales are of."""

    def __init__(self, recipe, right):
        super().__init__(exact if recipe.bwd else bf16)
        self.forward_store = exact
        self.right = right
        self.recipe = recipe
        self.p_scale = 256.0 if recipe.blocks else 448.0  # P is at most 1
        self.ds_scale = scale_of(E5M2, right.amax_ds)

    def weights(self, weights, factor):
        return cast(E4M3, weights, self.p_scale) * factor[:, None]

    def total_of_lse(self, place, of_lse, again):
        """The sum of its own rounded logits, off by as much as the lse is from that of the operands."""
        of_lse, of_operands = self.right.totals[place]
        return again * np.divide(of_lse, of_operands, out=np.ones_like(again), where=of_operands > 0)

    def normalised(self, prob):
        return (prob, cast(E4M3, prob, self.p_scale)) if self.recipe.bwd else super().normalised(prob)

    def gradient(self, ds, chunks):
        if not self.recipe.bwd:
            return ds, ds
        if not self.recipe.blocks:
            ds = cast(E5M2, ds, self.ds_scale)
            return ds, ds
        queries, keys = (block_starts(length, chunk) for length, chunk in zip(ds.shape, chunks))
        return cast_blocks(ds, 1, keys), cast_blocks(ds, 0, queries)

    def store_results(self, results):
        if self.recipe.out_in_fp8:
            results["out"] = cast_by_amax(E4M3, results["out"])
        if self.recipe.gradients_in_fp8 and "dq" in results:
            names = ("dq", "dk", "dv")
            scale = scale_of(E5M2, max(np.abs(results[name]).max(initial=0.0) for name in names))
            results.update({name: cast(E5M2, results[name], scale) for name in names})
        for name in ("out", "dq", "dk", "dv", "dbias"):
            if name in results:
                results[name] = bf16(results[name])


class Recipe:
    """Of dtype fp8, in Transformer Engine's terms."""

    def __init__(self, params):
        self.mode, self.bwd = params["scaling_mode"], params["fp8_bwd"]
        self.blocks = self.mode == "mxfp8"
        outside = self.mode == "delayed" or (self.mode == "current" and params["fp8_mha"])
        self.out_in_fp8 = outside
        self.gradients_in_fp8 = outside and self.bwd
        self.delta_of_fp8_out = self.mode == "delayed" or (self.mode == "current" and self.bwd and not params["f16_O"])

    def format(self, name):
        return E5M2 if name in ("dout", "dq", "dk", "dv") and not self.blocks else E4M3


class Fp8Case(Case):
    """Attention of the quantized tensors."""

    # What each product reads, with blocks along the head dimension or along the tokens.
    BLOCKS = {("logits", "q"): "rows", ("logits", "k"): "rows", ("out", "v"): "columns", ("dprob", "v"): "rows",
              ("dprob", "dout"): "rows", ("dv", "dout"): "columns", ("dq", "k"): "columns", ("dk", "q"): "columns"}

    def __init__(self, folder, index):
        super().__init__(folder, index)
        self.recipe = Recipe(self.params)
        self.other_logits_backward = not self.recipe.bwd
        self.operands = {}
        if index.get("kernels", {}).get("fp8_products") == "native":
            self.logit_error = 2.0**-11  # tensor cores cut off the sums of 8-bit products (kernels/attention/checks/judge.cpp)

    def oracle(self, run):
        """Of both runs the same, since both have the delta of the run with CP."""
        if self.oracles is None:
            steps = Steps(exact)
            self.oracles = self.compute(steps), self.compute(Fp8Steps(self.recipe, steps))
        return self.oracles

    def exact(self, name):
        return self.tensors[name + ".npy"].astype(np.float64)

    def held(self, name):
        return ~self.padding(name)

    def joint_amax(self, name):
        """The amax that the scale of a tensor is of: q, k and v share one, and dq, dk and dv."""
        names = next((group for group in (("q", "k", "v"), ("dq", "dk", "dv")) if name in group), (name,))
        return max(np.abs(self.exact(n)[self.held(n)]).max(initial=0.0) for n in names)

    def payload(self, name, blocks=None):
        """Bytes and scales of a tensor, where the folder has them: a number, or an array by element."""
        suffix = "_" + blocks if blocks else ""
        file, scale = f"{name}_payload{suffix}.npy", f"{name}_scale_{'e8m0' if blocks else 'inv'}{suffix}.npy"
        if file not in self.tensors or scale not in self.tensors:
            return None
        scales = self.tensors[scale]
        shape = self.scale_shape(name, blocks)
        if scales.shape != shape:
            raise Unusable(f"{scale} has shape {scales.shape} and must have {shape}")
        if blocks is None:
            return file, self.tensors[file], float(scales[0])
        return file, self.tensors[file], self.spread(decode_e8m0(scales), name, blocks)

    def places_in_blocks(self, side):
        """For each sequence where the blocks of its places begin, and how many places it has. None crosses a chunk."""
        rooms = [int(room) for room in np.diff(self.cumulated[side])]
        return [(block_starts(room, self.chunk(side, s)), room) for s, room in enumerate(rooms)]

    def scale_shape(self, name, blocks):
        shape = list(self.tensors[name + ".npy"].shape)
        if blocks is None:
            return (1,)
        if blocks == "rows":
            shape[-1] //= BLOCK
            return tuple(shape)
        counts = [len(starts) for starts, _ in self.places_in_blocks(self.side(name))]
        layout = self.params["qkv_format"]
        shape[1 if layout == "bshd" else 0] = sum(counts) if layout == "thd" else counts[0]
        return tuple(shape)

    def spread(self, scales, name, blocks):
        """Scales by element. Places that belong to no sequence have 1."""
        if blocks == "rows":
            return np.repeat(scales, BLOCK, axis=-1)
        by_element, layout, block = np.ones(self.tensors[name + ".npy"].shape), self.params["qkv_format"], 0
        for s, (starts, room) in enumerate(self.places_in_blocks(self.side(name))):
            lengths = np.diff(starts + [room])
            if layout == "thd":
                begin = self.begins[self.side(name)][s]
                by_element[begin : begin + room] = np.repeat(scales[block : block + len(starts)], lengths, axis=0)
                block += len(starts)
            elif layout == "bshd":
                by_element[s] = np.repeat(scales[s], lengths, axis=0)
            else:
                by_element[:, s] = np.repeat(scales[:, s], lengths, axis=0)
        return by_element

    def cast_blocks(self, name, blocks):
        """A tensor in blocks along the head dimension (`rows`), or along the tokens of each chunk (`columns`)."""
        values = self.exact(name)
        if blocks == "rows":
            return cast_blocks(values, values.ndim - 1, block_starts(values.shape[-1], values.shape[-1]))
        for s in range(self.params["batch_size"]):
            tokens = self.tokens(values, name, s)
            tokens[...] = cast_blocks(tokens, 0, block_starts(len(tokens), self.chunk(self.side(name), s)))
        return values

    def quantized(self, name, blocks):
        """The values that 8-bit products read of a tensor."""
        if (name, blocks) not in self.operands:
            form = self.recipe.format(name)
            found = self.payload(name, blocks)
            if found:
                values = form.decode(found[1]) * found[2]
            elif name == "out" and self.recipe.out_in_fp8:
                values = self.exact(name)  # the payload times the scale already
            elif blocks:
                values = self.cast_blocks(name, blocks)
            else:
                values = cast(form, self.exact(name), scale_of(form, self.joint_amax(name)))
            self.operands[name, blocks] = values
        return self.operands[name, blocks]

    def operand(self, product, name, sequence):
        return self.tokens(self.read(product, name), name, sequence)

    def read(self, product, name):
        recipe = self.recipe
        if product == "delta" and name == "out":
            if recipe.delta_of_fp8_out:
                return self.quantized("out", None)
            # The first one is there where out.npy is made from a payload.
            return self.exact("out_f16" if "out_f16.npy" in self.tensors else "out")
        if name == "dout" and (not recipe.bwd or (recipe.blocks and product == "delta")):
            return self.exact(name)
        if recipe.bwd or product in ("logits", "out"):
            return self.quantized(name, self.BLOCKS[product, name] if recipe.blocks else None)
        # A backward pass in 16 bits gets what the forward pass has read.
        return bf16(self.quantized(name, self.BLOCKS["out" if name == "v" else "logits", name] if recipe.blocks else None))

    def delta(self, prob, dprob, sequence, head):
        """Of the output and its gradient that the backward pass got: their own rounding is not an error of it."""
        return (self.operand("delta", "out", sequence)[:, head] * self.operand("delta", "dout", sequence)[:, head]).sum(axis=1)

    def check_casts(self):
        """For each payload of the folder its file and what is wrong with it, or nothing."""
        for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv"):
            for blocks in ("rows", "columns") if self.recipe.blocks else (None,):
                if found := self.payload(name, blocks):
                    yield found[0], self.wrong_cast(name, blocks, *found[1:])

    def wrong_cast(self, name, blocks, payload, scale):
        held, form = self.held(name), self.recipe.format(name)
        given, values = form.decode(payload), self.exact(name)
        if blocks:
            wrong = given * scale != self.cast_blocks(name, blocks)
        else:
            # The scale that its inverse is of, or a neighbour: the inverse is rounded.
            middle = np.float32(1) / np.float32(scale)
            nearest = [form.round((values.astype(np.float32) * np.float32(s)).astype(np.float64))
                       for s in (middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf)))]
            wrong = np.logical_and.reduce([given != one for one in nearest])
        if wrong[held].any():
            return f"{np.count_nonzero(wrong[held])} of {wrong[held].size} elements are not the nearest"
        if blocks:
            return None
        amax, most = self.joint_amax(name), form.largest * scale
        if amax == 0:
            return None if scale == 1 else f"the amax is 0, and the scale is not 1 but {1 / scale:.4g}"
        # Steps of a ring may have larger results than their sum.
        if most < amax * (1 - 2.0**-7) or (name in ("q", "k", "v", "dout") and most > amax * (1 + 2.0**-7)):
            return f"the scale is of an amax of {most:.4g}, and the amax is {amax:.4g}"
        return None

    def wrong_statistics(self, name, given, right, plain):
        """What is wrong with the RMS error, or with the gain; and both as text."""
        rms = lambda x: float(np.sqrt(np.mean(np.square(x))))
        if name not in ("out", "dq", "dk", "dv") or given.size < 65536 or rms(right) == 0:
            return None, ""
        error, allowed = rms(given - right) / rms(right), rms(plain - right) / rms(right)
        gain = float((given * right).sum() / np.square(right).sum())
        text = f", rms {error:.2%} (plain {allowed:.2%}), gain {gain:.3f}"
        if not abs(gain - 1) <= 0.05:
            return "the gain is not 1", text
        if not error <= 1.5 * allowed + 0.002:
            return "the RMS error is too large", text
        if (name == "out" or self.recipe.bwd) and not error >= 0.6 * allowed:
            return "the RMS error is too small: a cast was left out", text
        return None, text

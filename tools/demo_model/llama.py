# SPDX-License-Identifier: Apache-2.0
"""The Llama architecture in plain PyTorch, with the weight names of Hugging Face, and a writer of safetensors.

All but attention works on flat rows [tokens, features]: the shapes stay the same while sequences grow longer and
batches smaller, so torch.compile compiles once.
"""
import contextlib
import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def rms_norm(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def linear(x, *weights):
    """x times the transpose of the weights, which stand below each other; computed in the type of x."""
    return F.linear(x, torch.cat([w.to(x.dtype) for w in weights]) if len(weights) > 1 else weights[0].to(x.dtype))


def rotate(x, cos, sin):
    """Rotary position of x [rows, heads, dim]: feature i turns with feature i + dim / 2."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def before_attention(x, norm, wq, wk, wv, cos, sin, eps: float, dim: int):
    q, k, v = linear(rms_norm(x, norm, eps), wq, wk, wv).split([wq.shape[0], wk.shape[0], wv.shape[0]], -1)
    rows = x.shape[0]
    return (rotate(q.view(rows, -1, dim), cos, sin), rotate(k.view(rows, -1, dim), cos, sin),
            v.reshape(rows, -1, dim))


def after_attention(x, attended, wo, norm, w_gate, w_up, w_down, eps: float):
    x = x + linear(attended, wo)
    gate, up = linear(rms_norm(x, norm, eps), w_gate, w_up).chunk(2, -1)
    return x + linear(F.silu(gate) * up, w_down)


def token_losses(x, norm, embedding, targets, eps: float):
    """Per row: the cross-entropy, and whether the likeliest token is the target."""
    logits = linear(rms_norm(x, norm, eps), embedding).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.detach().argmax(-1) == targets


def _weights(**shapes):
    """A module whose child `name` holds one tensor `weight`."""
    module = nn.Module()
    for name, shape in shapes.items():
        child = nn.Module()
        child.weight = nn.Parameter(torch.empty(shape))
        module.add_module(name, child)
    return module


class Llama(nn.Module):
    def __init__(self, config, seed=0):
        super().__init__()
        self.config = config
        hidden, inner, self.dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.eps = config["rms_norm_eps"]
        q_rows, kv_rows = self.heads * self.dim, self.kv_heads * self.dim
        self.model = _weights(embed_tokens=(config["vocab_size"], hidden), norm=(hidden,))
        self.model.layers = nn.ModuleList()
        for _ in range(config["num_hidden_layers"]):
            layer = _weights(input_layernorm=(hidden,), post_attention_layernorm=(hidden,))
            layer.self_attn = _weights(q_proj=(q_rows, hidden), k_proj=(kv_rows, hidden), v_proj=(kv_rows, hidden),
                                       o_proj=(hidden, q_rows))
            layer.mlp = _weights(gate_proj=(inner, hidden), up_proj=(inner, hidden), down_proj=(hidden, inner))
            self.model.layers.append(layer)
        self._initialise(seed)
        self.eager = (before_attention, after_attention, token_losses)
        self.compiled = self.eager
        self.attention_backend = None

    def _initialise(self, seed):
        generator = torch.Generator().manual_seed(seed)
        shrink = (2 * self.config["num_hidden_layers"]) ** -0.5
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() == 1:
                    weight.fill_(1.0)
                    continue
                scale = 0.02 if "embed" in name else weight.shape[1] ** -0.5
                if "o_proj" in name or "down_proj" in name:
                    scale *= shrink
                weight.normal_(0.0, scale, generator=generator)

    def rotary(self, positions):
        """cos and sin [rows, 1, dim / 2] of flat positions."""
        exponents = torch.arange(0, self.dim, 2, device=positions.device, dtype=torch.float32) / self.dim
        angles = positions.flatten().float()[:, None] * self.config["rope_theta"] ** -exponents
        return angles.cos()[:, None], angles.sin()[:, None]

    def attend(self, q, k, v, batch):
        """Causal attention of flat rows, batch sequences of equal length."""
        def spread(x):
            x = x.view(batch, -1, x.shape[-2], self.dim)
            if x.shape[2] != self.heads:
                x = x.repeat_interleave(self.heads // x.shape[2], 2)
            return x.transpose(1, 2)

        choice = contextlib.nullcontext() if self.attention_backend is None else sdpa_kernel(self.attention_backend)
        with choice:
            out = F.scaled_dot_product_attention(spread(q), spread(k), spread(v), is_causal=True)
        return out.transpose(1, 2).reshape(q.shape[0], -1)

    def hidden_rows(self, tokens, positions, dtype, compiled=False):
        """tokens and positions [batch, length] -> rows [batch * length, hidden] before the last norm."""
        before, after, _ = self.compiled if compiled else self.eager
        x = F.embedding(tokens.flatten(), self.model.embed_tokens.weight).to(dtype)
        cos, sin = self.rotary(positions)
        for layer in self.model.layers:
            a, m = layer.self_attn, layer.mlp
            q, k, v = before(x, layer.input_layernorm.weight, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, cos,
                             sin, self.eps, self.dim)
            x = after(x, self.attend(q, k, v, tokens.shape[0]), a.o_proj.weight, layer.post_attention_layernorm.weight,
                      m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight, self.eps)
        return x

    def losses(self, tokens, positions, targets, dtype, compiled=False):
        """Cross-entropy and correctness [batch, length] of the targets."""
        rows = self.hidden_rows(tokens, positions, dtype, compiled)
        loss, correct = (self.compiled if compiled else self.eager)[2](
            rows, self.model.norm.weight, self.model.embed_tokens.weight, targets.flatten(), self.eps)
        return loss.view(targets.shape), correct.view(targets.shape)

    def logits(self, tokens, at, dtype):
        """Logits [batch, positions, vocabulary] at the positions `at` [batch, positions] of tokens [batch, length]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        rows = self.hidden_rows(tokens, positions, dtype).view(*tokens.shape, -1)
        rows = rows.gather(1, at[:, :, None].expand(-1, -1, rows.shape[-1]))
        return linear(rms_norm(rows, self.model.norm.weight, self.eps), self.model.embed_tokens.weight).float()


def choose_attention(model, length, dtype):
    """Times the attention backends on this GPU. Flash stays unless cuDNN is clearly faster and its gradients agree."""
    shape = (1, length, model.heads, model.dim)
    inputs = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2)
    timings, reference = {}, None
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with sdpa_kernel(backend):
                for turn in range(4):  # the first one warms up
                    if turn == 1:
                        begin.record()
                    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs), is_causal=True)
                    gradients = torch.autograd.grad(out, inputs, upstream)
            end.record()
            torch.cuda.synchronize()
            reference = gradients if reference is None else reference
            if all((g.float() - r.float()).norm() <= 0.02 * r.float().norm() for g, r in zip(gradients, reference)):
                timings[backend] = begin.elapsed_time(end) / 3
            else:
                print(f"attention by {backend}: other gradients, left out", flush=True)
        except RuntimeError as error:
            print(f"attention by {backend}: {str(error).splitlines()[0]}", flush=True)
    flops = 7 * length * length * model.heads * model.dim
    for backend, ms in timings.items():
        print(f"attention by {backend}: {ms:.1f} ms for {length} tokens, {flops / ms / 1e9:.0f} TFLOP/s", flush=True)
    handicap = {SDPBackend.CUDNN_ATTENTION: 1.15}
    model.attention_backend = min(timings, key=lambda b: timings[b] * handicap.get(b, 1)) if timings else None


def write_safetensors(path, named_tensors):
    """bf16 weights in the safetensors format: length of the header, header in JSON, data."""
    header, blobs, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name, tensor in named_tensors:
        blob = tensor.detach().to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().tobytes()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(blobs)

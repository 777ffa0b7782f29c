#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package: results against numpy in double precision, ranks, a Llama, errors, the types that it declares.

Usage: python_test.py DEMO_MODEL, with the package on the PYTHONPATH.
"""

import ast
import collections
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import traceback
import unittest

import numpy as np

import treeattn

try:
    import torch
except ImportError:
    torch = None

DEMO_MODEL = sys.argv.pop(1)
RNG = np.random.default_rng()


def draw(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def expected(q, k, v, causal=False):
    """out and lse in double precision; k and v [batch, tokens, kv_heads, dim]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    logits = np.einsum("bqhd,bthd->bhqt", q, k) / np.sqrt(q.shape[-1])
    if causal:
        positions = np.arange(k.shape[1])
        hidden = positions[None, :] > positions[-q.shape[1]:, None]
        logits = np.where(hidden, -np.inf, logits)
    most = logits.max(-1, keepdims=True)
    weights = np.exp(logits - most)
    total = weights.sum(-1, keepdims=True)
    return (np.einsum("bhqt,bthd->bqhd", weights / total, v),
            np.swapaxes((most + np.log(total))[..., 0], 1, 2))


def declared(*path):
    """What the stub, which editors and type checkers read, says of the module or of a class: lists by name."""
    body = ast.parse((pathlib.Path(treeattn.__file__).parent / "_core.pyi").read_text()).body
    for name in path:
        body = next(node.body for node in body if getattr(node, "name", None) == name)
    names = collections.defaultdict(list)
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AnnAssign)):
            names[node.target.id if isinstance(node, ast.AnnAssign) else node.name].append(node)
    return names


def declared_keys(name):
    """Those of a dictionary, also of what it is made from."""
    bases = {base.id for base in declared()[name][0].bases} - {"TypedDict"}
    return set(declared(name)).union(*map(declared_keys, bases))


def declared_options(*path):
    options, = {node.args.kwarg.annotation.slice.id for node in declared(*path[:-1])[path[-1]]}
    return declared_keys(options)


def accepted_options(call):
    try:
        call(no_such_option=1)
    except TypeError as error:
        return set(str(error).split("accepted: ")[1].split(", "))


class Types(unittest.TestCase):
    def parameters(self, function):
        args = function.args
        may_be_left_out = [default is not None for default in args.kw_defaults]
        return ([x.arg for x in args.posonlyargs + args.args], len(args.defaults), [x.arg for x in args.kwonlyargs],
                may_be_left_out, args.kwarg and args.kwarg.arg)

    def same(self, thing, *path):
        said = declared(*path)
        names = {name for name in vars(thing) if name[0] != "_"}
        self.assertEqual({name for name in said if name[0] != "_"}, names)
        if type(vars(thing).get("__init__")).__module__ == "nanobind":
            names.add("__init__")
        for name in names:
            member = getattr(thing, name)
            if isinstance(member, type):
                self.same(member, *path, name)
            elif type(member).__module__ == "nanobind":  # whose text opens with how it is called
                real, = ast.parse(f"def {member.__doc__.splitlines()[0]}: ...").body
                self.assertTrue(said[name])
                for node in said[name]:
                    self.assertEqual(self.parameters(node), self.parameters(real), (path, name))

    def test_every_public_name_and_parameter(self):
        self.assertTrue((pathlib.Path(treeattn.__file__).parent / "py.typed").exists())
        self.same(treeattn)

    def test_options(self):
        x = draw(1, 1, 1, 16)
        world = treeattn.self_communicator()
        cache = treeattn.KvCache(world, kv_heads=1, k_dim=16, v_dim=16)
        attention = treeattn.ParallelAttention(world)
        for path, call in {
                ("attention",): lambda **options: treeattn.attention(x, x, x, **options),
                ("states",): lambda **options: treeattn.states(x, x, x, **options),
                ("KvCache", "append"): lambda **options: cache.append(0, x, x, **options),
                ("KvCache", "write"): lambda **options: cache.write(0, 0, 0, x, x, **options),
                ("ParallelAttention", "decode"): lambda **options: attention.decode(cache, 0, [], x, **options),
                ("ParallelAttention", "prefill"): lambda **options: attention.prefill(cache, 0, 0, 0, 1, x, **options),
        }.items():
            self.assertEqual(declared_options(*path), accepted_options(call), path)


class Attention(unittest.TestCase):
    def near(self, got, want, tolerance=1e-5):
        for one, other in zip(got, want):
            self.assertEqual(one.shape, other.shape)
            self.assertLess(np.abs(np.asarray(one, np.float64) - other).max(), tolerance)

    def test_groups_masks_and_strides(self):
        q, k, v = draw(2, 3, 6, 40), draw(2, 777, 2, 40), draw(2, 777, 2, 24)
        want = expected(q, k, v, causal=True)
        self.near(treeattn.attention(q, k, v, causal=True), want)
        heads_first = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (k, v)]
        self.near(treeattn.attention(q, *heads_first, causal=np.True_), want)

    def test_lengths_hide_keys(self):
        q, k, v = draw(2, 1, 4, 64), draw(2, 300, 4, 64), draw(2, 300, 4, 64)
        got = treeattn.attention(q, k, v, lengths=np.array([100, 0]))
        self.near([x[:1] for x in got], expected(q[:1], k[:1, :100], v[:1, :100]))
        self.assertTrue((got[0][1] == 0).all() and (got[1][1] == -np.inf).all())

    def test_no_keys(self):
        q, k = draw(1, 1, 4, 64), np.empty((1, 0, 4, 64), np.float32)  # whose strides are 0 in numpy
        out, lse = treeattn.attention(q, k, k)
        self.assertTrue((out == 0).all() and (lse == -np.inf).all())

    def test_int8_with_scales_in_pages(self):
        rows = [RNG.integers(-127, 128, (4, 64, 2, 32), np.int8) for _ in "kv"]
        scales = [RNG.uniform(0.5, 1.5, (4, 64, 2)).astype(np.float32) / 127 for _ in "kv"]
        table = np.array([[2, 0, 3]], np.int32)
        q = draw(1, 1, 4, 32)
        got = treeattn.attention(q, *rows, k_scales=scales[0], v_scales=scales[1], page_table=table, lengths=[150])
        k, v = ((r * s[..., None])[table[0]].reshape(1, 192, 2, 32)[:, :150] for r, s in zip(rows, scales))
        self.near(got, expected(q, k, v), 1e-3)

    def test_states_of_parts_merge(self):
        q, k, v = draw(1, 2, 4, 64), draw(1, 500, 4, 64), draw(1, 500, 4, 64)
        whole = {"causal": True, "first_query": [498]}
        parts = [treeattn.states(q, k[:, a:b], v[:, a:b], first_key=a, **whole) for a, b in ((0, 192), (192, 500))]
        before = parts[0].copy()
        self.near(treeattn.finalize(treeattn.merge(*parts)), expected(q, k, v, causal=True))
        self.assertTrue((parts[0] == before).all())
        with self.assertRaisesRegex(treeattn.InvalidArgument, "another shape"):
            treeattn.merge(parts[0], parts[1].reshape(1, 4, 2, 66))
        with self.assertRaisesRegex(treeattn.InvalidArgument, "sinks: 2 values; .* 4"):
            treeattn.finalize(parts[0], sinks=[0, 0])

    def test_after_a_fork(self):
        q, k, v = draw(1, 1, 4, 64), draw(1, 3000, 4, 64), draw(1, 3000, 4, 64)
        out, _ = treeattn.attention(q, k, v)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if (treeattn.attention(q, k, v)[0] == out).all() else 2
            finally:
                os._exit(status)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)

    @unittest.skipIf(torch is None, "no torch")
    def test_torch_in_bfloat16(self):
        q, k, v = (torch.from_numpy(draw(1, n, 8, 64)).bfloat16() for n in (1, 400, 400))
        out, lse = treeattn.attention(q, k, v)
        self.assertTrue(torch.is_tensor(out) and torch.is_tensor(lse))
        self.near([out.numpy(), lse.numpy()], expected(*(x.float().numpy() for x in (q, k, v))), 1e-3)

    @unittest.skipIf(torch is None, "no torch")
    def test_other_tensors(self):
        class Mine(torch.Tensor):
            pass

        q, k, v = (torch.from_numpy(draw(1, n, 4, 64)) for n in (1, 10, 10))
        out, lse = treeattn.attention(q.as_subclass(Mine), k, v, lengths=torch.tensor([7]), sinks=torch.zeros(4))
        self.assertTrue(torch.is_tensor(out) and torch.is_tensor(lse))
        want, _ = treeattn.attention(q, k, v, lengths=[7], sinks=[0.0] * 4)
        self.assertTrue((out == want).all())
        wants_gradient = k.clone().requires_grad_()
        with self.assertRaisesRegex(treeattn.InvalidArgument, "gradient"):
            treeattn.attention(q, wants_gradient, v)
        with torch.no_grad():
            treeattn.attention(q, wants_gradient, v)
        states, per_head = treeattn.states(q, k, v), torch.zeros(4)
        rows, scales = torch.zeros(1, 10, 4, 64, dtype=torch.int8), torch.ones(1, 10, 4)
        for name, call in {
                "sinks": lambda: treeattn.attention(q, k, v, sinks=per_head.requires_grad_()),
                "alibi_slopes": lambda: treeattn.attention(q, k, v, alibi_slopes=per_head.requires_grad_()),
                "k_scales": lambda: treeattn.attention(q, rows, v, k_scales=scales.requires_grad_()),
                "lower": lambda: treeattn.merge(states.requires_grad_(), states),
                "states": lambda: treeattn.finalize(states.requires_grad_()),
        }.items():
            with self.assertRaisesRegex(treeattn.InvalidArgument, f"^{name}: .*gradient"):
                call()
        with self.assertRaisesRegex(treeattn.InvalidArgument, "resolve_neg"):
            treeattn.attention(q, torch._neg_view(k), v)

    def test_errors_say_what_is_accepted(self):
        q, k, v = draw(1, 1, 4, 64), draw(1, 10, 4, 64), draw(1, 10, 4, 64)
        states = treeattn.states(q, k, v)
        for message, call in {
                "states: .*dense float32": lambda: treeattn.finalize(states.astype(np.float64)),
                "higher: .*dense float32": lambda: treeattn.merge(states, states[..., ::2]),
                "accepted: 4: batch": lambda: treeattn.attention(q[0], k, v),
                "head_dim": lambda: treeattn.attention(q, k[..., :32], v),
                "a row in one piece": lambda: treeattn.attention(q, k[..., ::2], v),
                "accepted: an array": lambda: treeattn.attention(q, "k", v),
                "k: a masked array": lambda: treeattn.attention(q, np.ma.masked_array(k, k > 0), v),
                "k_scales: elements": lambda: treeattn.attention(q, k, v, k_scales=np.ones((1, 10, 4))),
                "k_scales: 9 in": lambda: treeattn.attention(q, k, v, k_scales=np.ones((1, 9, 4), np.float32)),
                "DLPack type": lambda: treeattn.attention(q, k.astype(np.float64), v),
                "of >f4; accepted": lambda: treeattn.attention(q, k.astype(">f4"), v),
                "dense int32": lambda: treeattn.attention(q, k, v, page_table=np.array([[1 << 32]])),
                "lengths": lambda: treeattn.attention(q, k, v, lengths=[11]),
                "window: 'wide'": lambda: treeattn.attention(q, k, v, window="wide"),
                "rows of 2 floats": lambda: treeattn.finalize(draw(3, 2)),
        }.items():
            with self.subTest(message), self.assertRaisesRegex(treeattn.InvalidArgument, message):
                call()
        self.assertTrue(issubclass(treeattn.InvalidArgument, ValueError))
        with self.assertRaisesRegex(TypeError, "no option 'caussal'; accepted: alibi_slopes"):
            treeattn.attention(q=q, k=k, v=v, caussal=True)
        with self.assertRaisesRegex(TypeError, "no option"):
            treeattn.attention(q, k, v, **{"\ud800": 1})


class Ranks(unittest.TestCase):
    def test_a_decoding_loop_has_the_bits_of_one_rank(self):
        steps = [(draw(1, n, 2, 64), draw(1, n, 2, 64), draw(1, 1, 4, 64)) for n in (3000, 1, 1)]

        def loop(world):
            cache = treeattn.KvCache(world, kv_heads=2, k_dim=64, v_dim=64, k_type="float32", v_type="float32",
                                     chunk_tokens=64)
            attention = treeattn.ParallelAttention(world, strategy="merge")
            sequence = cache.add_sequence()
            results = []
            for k, v, q in steps:
                cache.append(sequence, k, v)
                results.append(attention.decode(cache, 0, [sequence], q, causal=True))
            return results, sum(count for _, count in cache.carried(sequence, 0, cache.length(sequence)))

        (alone, _), = treeattn.run_ranks(1, loop)
        together = treeattn.run_ranks(3, loop)
        self.assertEqual(sum(carried for _, carried in together), 3002)
        for results, _ in together:
            for one, other in zip(alone, results):
                self.assertTrue(all((a == b).all() for a, b in zip(one, other)))
        k, v = (np.concatenate([step[i] for step in steps], axis=1) for i in (0, 1))
        for got, want in zip(alone[-1], expected(steps[-1][2], k, v)):
            self.assertLess(np.abs(got - want).max(), 1e-5)

    def test_prefill_and_saved_caches(self):
        k, v, q = draw(1, 400, 2, 32), draw(1, 400, 2, 32), draw(1, 400, 2, 32)
        want = expected(q, k, v, causal=True)[0]

        def prefill(world, directory):
            cache = treeattn.KvCache(world, kv_heads=2, k_dim=32, v_dim=32, k_type="f32", v_type="f32",
                                     chunk_tokens=64)
            sequence = cache.add_sequence()
            cache.append(sequence, k, v)
            carried = cache.carried(sequence, 0, 400)
            mine = np.concatenate([np.arange(first, first + count) for first, count in carried])
            attention = treeattn.ParallelAttention(world)
            out, _ = attention.prefill(cache, 0, sequence, 0, 400, q[:, mine], causal=True)
            with self.assertRaisesRegex(TypeError, "no option 'first_query'"):
                attention.prefill(cache, 0, sequence, 0, 400, q[:, mine], first_query=[0])
            self.assertLess(np.abs(out - want[:, mine]).max(), 1e-5)
            cache.save(directory)

        def load(world, directory):
            cache = treeattn.KvCache.load(world, directory)
            return treeattn.ParallelAttention(world).decode(cache, 0, cache.sequences(), q[:, -1:])[0]

        with tempfile.TemporaryDirectory() as directory:
            directory = pathlib.Path(directory)
            treeattn.run_ranks(2, lambda world: prefill(world, directory))
            for out in treeattn.run_ranks(3, lambda world: load(world, directory)):
                self.assertLess(np.abs(out - want[:, -1:]).max(), 1e-5)

    def test_what_a_rank_raises_comes_through(self):
        def body(world):
            if world.rank == 1:
                raise KeyError("mine")
            world.barrier()

        with self.assertRaisesRegex(KeyError, "mine"):
            treeattn.run_ranks(3, body, deadline=5)
        class Mine(treeattn.LostRanks):
            pass

        def leaves(world):
            if world.rank == 0:
                try:
                    world.barrier()
                except treeattn.LostRanks as lost:
                    raise Mine("mine") from lost

        try:  # assertRaises would drop where it came from
            treeattn.run_ranks(2, leaves, deadline=5)
            self.fail("nobody was missed")
        except Mine as lost:
            self.assertIn("leaves", [frame.name for frame in traceback.extract_tb(lost.__traceback__)])
            self.assertEqual(lost.__cause__.ranks, [1])

    def test_lost_ranks_are_named(self):
        said = []

        def body(world):
            number = world.rank
            for leaves in (1, 2):
                if number == leaves:
                    return
                with self.assertRaises(treeattn.LostRanks) as lost:
                    world.barrier()
                said.append((lost.exception.ranks, lost.exception.lost_so_far))
                world = world.shrink()
            if number == 0:
                world.barrier()

        with self.assertRaises(treeattn.LostRanks) as lost:
            treeattn.run_ranks(4, body, deadline=5)
        self.assertEqual(sorted(said), [([1], [1])] * 3 + [([1], [1, 2])] * 2)
        self.assertEqual((lost.exception.ranks, lost.exception.lost_so_far), ([1], [1, 2, 3]))

        def raises_its_own(_):
            raise treeattn.LostRanks("mine")

        with self.assertRaisesRegex(treeattn.LostRanks, "mine") as lost:
            treeattn.run_ranks(1, raises_its_own)
        self.assertEqual(lost.exception.ranks, [])

    def test_ctrl_c_ends_all_ranks(self):
        ended = []

        def body(world):
            if world.rank == 0:
                os.kill(os.getpid(), signal.SIGINT)
            for _ in range(2000):
                time.sleep(0.01)
            ended.append(world.rank)

        with self.assertRaises(KeyboardInterrupt):
            treeattn.run_ranks(2, body)
        self.assertEqual(ended, [])

    def test_one_thread_at_a_time(self):
        k, q = draw(1, 300, 1, 16), draw(1, 1, 1, 16)
        of_rank_0, refused, left = [], [], threading.Event()

        def body(world):
            cache = treeattn.KvCache(world, kv_heads=1, k_dim=16, v_dim=16, chunk_tokens=64)
            sequence = cache.add_sequence()
            cache.append(sequence, k, k)
            if world.rank == 0:
                of_rank_0.append(cache)
            while world.rank == 1 and not refused and not left.is_set():  # until rank 0 decodes, and waits for this one
                try:
                    all(other.length(sequence) for other in of_rank_0)
                except treeattn.Error as error:
                    refused.append(str(error))
            try:
                treeattn.ParallelAttention(world, strategy="merge").decode(cache, 0, [sequence], q)
            finally:
                left.set()
            return cache.length(sequence)

        self.assertEqual(treeattn.run_ranks(2, body, deadline=20), [300, 300])
        self.assertRegex(refused[0], "another thread")

    def test_rows_of_a_fork(self):
        world = treeattn.self_communicator()
        cache = treeattn.KvCache(world, kv_heads=1, k_dim=16, v_dim=16, layers=2)
        one = cache.add_sequence()
        cache.extend(one, 5)
        for layer in (0, 1):
            cache.write(one, layer, 0, draw(1, 5, 1, 16), draw(1, 5, 1, 16))
        two = cache.fork(one)
        cache.truncate(two, 3)
        self.assertEqual([cache.length(s) for s in cache.sequences()], [5, 3])
        with self.assertRaises(treeattn.InvalidArgument):
            cache.append(one, draw(1, 1, 1, 16), draw(1, 1, 1, 16))


@unittest.skipIf(torch is None or treeattn.cuda_problem(), "no torch, or " + (treeattn.cuda_problem() or "no GPU"))
class Gpu(unittest.TestCase):
    def test_tensors_stay_there(self):
        host = [torch.from_numpy(draw(2, n, h, 128)).bfloat16() for n, h in ((1, 8), (900, 2), (900, 2))]
        want = expected(*(x.float().numpy() for x in host))
        q, k, v = (x.cuda() for x in host)
        merged = treeattn.finalize(treeattn.states(q, k, v).cpu())
        out, lse = treeattn.attention(q, k, v)
        self.assertTrue(out.is_cuda and lse.is_cuda)
        for got in ((out.cpu(), lse.cpu()), merged):
            for one, other in zip(got, want):
                self.assertLess(np.abs(one.numpy() - other).max(), 1e-3)
        with self.assertRaisesRegex(treeattn.InvalidArgument, "one device for all"):
            treeattn.attention(q, k.cpu(), v)

    def test_a_cache_there(self):
        k, v, q = (torch.from_numpy(draw(1, n, h, 64)).bfloat16() for n, h in ((700, 2), (700, 2), (1, 4)))

        def decode(world):
            cache = treeattn.KvCache(world, kv_heads=2, k_dim=64, v_dim=64, chunk_tokens=64, gpu=0)
            sequence = cache.add_sequence()
            cache.append(sequence, k[:, :300].cuda(), v[:, :300].cuda())
            cache.append(sequence, k[:, 300:], v[:, 300:])
            with self.assertRaisesRegex(treeattn.InvalidArgument, "on GPU 0"):
                treeattn.ParallelAttention(world).decode(cache, 0, [sequence], q.cuda())
            return treeattn.ParallelAttention(world).decode(cache, 0, [sequence], q)[0].numpy()

        want = expected(*(x.float().numpy() for x in (q, k, v)))[0]
        alone, = treeattn.run_ranks(1, decode)
        self.assertLess(np.abs(alone - want).max(), 1e-3)
        for out in treeattn.run_ranks(3, decode):
            self.assertTrue((out == alone).all())

    def test_a_llama_there(self):
        model = treeattn.LlamaModel.random("llama-3.2-1b", gpu=0)
        prompt, options = list(range(100, 400)), {"max_tokens": 8, "ignore_eos": True}
        alone = treeattn.LlamaSession(model).generate(prompt, **options)["tokens"]
        together = treeattn.run_ranks(2, lambda world: treeattn.LlamaSession(model, world).generate(prompt, **options))
        self.assertEqual([result["tokens"] for result in together], [alone] * 2)


class Llama(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        try:
            cls.model = treeattn.LlamaModel.load(DEMO_MODEL)
        except treeattn.Unavailable as error:  # a library without PCRE2
            raise unittest.SkipTest(str(error)) from error

    def test_text_goes_on_with_the_same_bits(self):
        parts, logits = [], []
        session = treeattn.LlamaSession(self.model)
        first = session.generate("Once upon a time", on_text=parts.append, on_logits=logits.append, max_tokens=12,
                                 ignore_eos=True)
        self.assertEqual("".join(parts), first["text"])
        self.assertEqual(self.model.decode(first["tokens"]).decode(), first["text"])
        self.assertEqual([int(x.argmax()) for x in logits], first["tokens"])
        self.assertEqual(first["reason"], "max_tokens")
        with tempfile.TemporaryDirectory() as directory:
            session.save(directory)
            second = session.generate("", max_tokens=5, ignore_eos=True)

            def go_on(world):
                saved = treeattn.LlamaSession.load(directory, self.model, world)
                return saved.generate("", max_tokens=5, ignore_eos=True)["tokens"]

            self.assertEqual(treeattn.run_ranks(2, go_on), [second["tokens"]] * 2)

    def test_types(self):
        session = treeattn.LlamaSession(self.model)
        self.assertEqual(declared_options("LlamaSession", "generate"),
                         accepted_options(lambda **options: session.generate("", **options)))
        self.assertEqual(declared_keys("_Answer"), set(session.generate("Once", max_tokens=1)))

    def test_tokens_log_probs_and_seeds(self):
        prompt = self.model.encode("The")
        said = []
        options = {"max_tokens": 4, "temperature": 1.0, "seed": 7, "logprobs": 2, "ignore_eos": True}
        result = treeattn.LlamaSession(self.model).generate(prompt, on_token=said.append, **options)
        self.assertEqual([token for token, _, _ in said], result["tokens"])
        self.assertTrue(all(logprob <= 0 and len(top) == 2 for _, logprob, top in said))
        self.assertEqual(treeattn.LlamaSession(self.model).generate(prompt, **options)["tokens"], result["tokens"])

    def test_ctrl_c(self):
        session = treeattn.LlamaSession(self.model)
        with self.assertRaises(KeyboardInterrupt):
            session.generate("Once", on_text=lambda _: os.kill(os.getpid(), signal.SIGINT), max_tokens=100,
                             ignore_eos=True)

        def body(world):
            if world.rank == 0:
                os.kill(os.getpid(), signal.SIGINT)
            ended.append(treeattn.LlamaSession(self.model, world).generate("Once", max_tokens=50000, ignore_eos=True))

        ended = []
        with self.assertRaises(KeyboardInterrupt):
            treeattn.run_ranks(2, body)
        self.assertEqual(ended, [])

    def test_other_threads_go_on(self):
        seen = []
        thread = threading.Thread(target=lambda: seen.append(treeattn.LlamaSession(self.model).generate(
            "Once", max_tokens=3)["tokens"]))
        thread.start()
        treeattn.LlamaSession(self.model).generate("Once", max_tokens=3)
        thread.join()
        self.assertEqual(len(seen), 1)

    def test_errors(self):
        with self.assertRaisesRegex(treeattn.BadFile, "config.json"):
            treeattn.LlamaModel.load(str(pathlib.Path(DEMO_MODEL) / "none"))
        with self.assertRaisesRegex(treeattn.InvalidArgument, "int4"):
            treeattn.LlamaModel.load(DEMO_MODEL, weights="int4")
        with self.assertRaisesRegex(treeattn.InvalidArgument, "temperature"):
            treeattn.LlamaSession(self.model).generate("Once", temperature=-1)
        with self.assertRaisesRegex(TypeError, "no option 'top_q'"):
            treeattn.LlamaSession(self.model).generate("Once", top_q=1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    unittest.main()

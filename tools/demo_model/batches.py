# SPDX-License-Identifier: Apache-2.0
"""Training sequences, put together on the GPU from tokenised paragraphs.

A sequence is <|begin_of_text|>, then whole paragraphs: stories, the needles between them, and as the last that fit the
questions with their answers; what follows them is cut off at the length. Nothing here loops over tokens.
"""
import numpy as np
import torch

import needles

TEXT, KEY_ANSWER, FACT_ANSWER = 0, 1, 2


class Batches:
    def __init__(self, path, device, seed):
        data = np.load(path)
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        to_device = lambda name: torch.from_numpy(data[name].astype(np.int64)).to(device)
        self.tokens, self.lengths, self.digits = to_device("tokens"), to_device("lengths"), to_device("digits")
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.mean_length = float(self.lengths.float().mean())
        names = ("key_needles", "key_questions", "fact_needles", "fact_questions")
        tables = {name: to_device(name) for name in names}
        self.width = max(t.shape[1] for t in tables.values())
        for name, table in tables.items():
            setattr(self, name, torch.nn.functional.pad(table, (0, self.width - table.shape[1]), value=needles.PAD))

    def _integers(self, high, shape):
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def _uniform(self, *shape):
        return torch.rand(shape, generator=self.generator, device=self.device)

    def _hidden_numbers(self, batch, facts):
        """Tokens of needles and questions [batch, facts, 2, width], their lengths, and what each token is."""
        labels = self._uniform(batch, len(self.fact_needles)).argsort(-1)[:, :facts - 1]
        needle = torch.cat([self.key_needles[self._integers(len(self.key_needles), (batch, 1))],
                            self.fact_needles[labels]], 1)
        question = torch.cat([self.key_questions[self._integers(len(self.key_questions), (batch, 1))],
                              self.fact_questions[labels]], 1)
        rows = torch.stack([needle, question], 2)
        number = self._integers(10, (batch, facts, 5))
        number[:, :, 0] = 1 + self._integers(9, (batch, facts))
        is_digit = (rows < 0) & (rows != needles.PAD)
        slot = torch.where(is_digit, -1 - rows, 0)
        digit = self.digits[number[:, :, None].expand(-1, -1, 2, -1).gather(3, slot)]
        before_number = torch.roll(rows == -1, -1, -1)  # the space before the first digit is part of the answer
        kind = torch.zeros_like(rows)
        kind[:, :1, 1] = KEY_ANSWER * (is_digit | before_number)[:, :1, 1]
        kind[:, 1:, 1] = FACT_ANSWER * (is_digit | before_number)[:, 1:, 1]
        return torch.where(is_digit, digit, rows), (rows != needles.PAD).sum(-1), kind

    def _story_ids(self, batch, count):
        """Paragraphs of each sequence: from the whole corpus, or from so few of them that stories come back."""
        whole = self._integers(len(self.lengths), (batch, count))
        few = 100 + self._integers(700, (batch, 1))
        narrow = (self._integers(len(self.lengths), (batch, 1)) + whole % few) % len(self.lengths)
        return torch.where(self._uniform(batch, 1) < 0.5, whole, narrow)

    def make(self, batch, length, facts, stretch_to, stretch_share):
        """tokens, positions, targets and kinds of the targets, each [batch, length]."""
        hidden, hidden_lengths, hidden_kind = self._hidden_numbers(batch, facts)
        count = int(length / self.mean_length * 1.25) + 24
        ids = self._story_ids(batch, count)
        story_lengths = self.lengths[ids]
        room = length - hidden_lengths.sum((1, 2))
        fitting = (story_lengths.cumsum(1) <= room[:, None]).sum(1, keepdim=True)

        # Every paragraph gets a place; sorted by place they are the sequence.
        number = torch.arange(count, device=self.device).float()[None]
        story_place = torch.where(number < fitting, number, number + 2e5)
        needle_place = (self._uniform(batch, facts) * (fitting + 1)).floor() - 0.5 + 0.4 * self._uniform(batch, facts)
        question_place = 1e5 + 100 * self._uniform(batch, facts)
        order = torch.cat([story_place, torch.stack([needle_place, question_place], 2).flatten(1)], 1).argsort(1)

        hidden_starts = len(self.tokens) + torch.arange(hidden_lengths.numel(), device=self.device) * self.width
        starts = torch.cat([self.starts[ids], hidden_starts.view(batch, -1)], 1).gather(1, order)
        lengths = torch.cat([story_lengths, hidden_lengths.flatten(1)], 1).gather(1, order)
        ends = 1 + lengths.cumsum(1)
        at = torch.arange(1, length + 1, device=self.device).expand(batch, -1).contiguous()
        paragraph = torch.searchsorted(ends, at, right=True).clamp_(max=ends.shape[1] - 1)
        source = (starts + lengths - ends).gather(1, paragraph) + at
        own = source - len(self.tokens)  # from here on: the place among the hidden numbers
        targets = torch.where(own < 0, self.tokens[source.clamp(max=len(self.tokens) - 1)],
                              hidden.flatten()[own.clamp(0, hidden.numel() - 1)])
        kinds = torch.where(own < 0, TEXT, hidden_kind.flatten()[own.clamp(0, hidden.numel() - 1)])
        tokens = torch.cat([torch.zeros_like(targets[:, :1]), targets[:, :-1]], 1)
        return tokens, self._positions(batch, length, stretch_to, stretch_share), targets, kinds

    def _positions(self, batch, length, stretch_to, stretch_share):
        """0, 1, 2 ...; in a share of the sequences with two leaps, so that a short one spans long distances."""
        at = torch.arange(length, device=self.device).expand(batch, -1)
        if stretch_to <= length or stretch_share == 0:
            return at
        leaps = self._uniform(batch, 2) * (stretch_to - length) / 2
        leaps = (leaps * (self._uniform(batch, 1) < stretch_share)).long()
        where = self._integers(length, (batch, 2))
        return at + ((at[:, :, None] >= where[:, None]) * leaps[:, None]).sum(-1)

"""Trains the demo model from scratch: `python -m benchmarks.demo.train --cpu-minutes 50 --out DIR`.

`--resume DIR` continues from saved weights, at lower rates and without the auxiliary loss.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen3VLForConditionalGeneration
from transformers.utils.logging import disable_progress_bar

from benchmarks.demo.architecture import HIDDEN, PROCESSOR_FILES, build_model, encode_images, prepare_for_training
from benchmarks.demo.batches import IGNORE, IMAGE_ROWS, Batch, BatchMaker
from benchmarks.demo.scenes import COLORS, SHAPES
from benchmarks.demo.tokenizer import load_tokenizer, train_tokenizer

MARKS = {"shape": len(SHAPES) + 1, "color": len(COLORS) + 1, "row": 3, "column": 3}
EMPTY_WEIGHT = 0.15
WARMUP_STEPS = 40
LOG_EVERY = 50


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The course of a run, its times as fractions of the budget and its rate as one of the base rates."""

    tower_only: float
    tower_weight: float
    peak: float
    decay_from: float

    def rate(self, spent: float, step: int) -> float:
        """The learning rate's scale: a short warm-up, the peak, then down in a straight line."""
        decay = min(1.0, (1 - spent) / (1 - self.decay_from))
        return min(1.0, (step + 1) / WARMUP_STEPS) * max(0.02, self.peak * decay)


FROM_SCRATCH = Plan(tower_only=0.25, tower_weight=0.5, peak=1.0, decay_from=0.5)
CONTINUED = Plan(tower_only=0.0, tower_weight=0.0, peak=0.25, decay_from=0.0)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The length of the training, in CPU seconds and in wall-clock seconds; the one that ends first counts."""

    cpu: float
    wall: float

    def spent(self, cpu_start: float, wall_start: float) -> float:
        """The spent fraction."""
        return max((time.process_time() - cpu_start) / self.cpu, (time.monotonic() - wall_start) / self.wall)


class Optimizers:
    """Muon for the inner matrices, AdamW for the rest, under one schedule."""

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        named = [*model.named_parameters(), *((f"head_embed.{name}", p) for name, p in head.named_parameters())]
        inner = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        outer = [p for name, p in named if p.ndim >= 2 and (p.ndim > 2 or "embed" in name)]
        vectors = [p for _, p in named if p.ndim < 2]
        self._clipped = outer + vectors
        muon = torch.optim.Muon(inner, lr=0.01, momentum=0.95, weight_decay=0.05, adjust_lr_fn="original")
        groups = [{"params": outer, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizers = (muon, torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.98)))
        self._rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]

    def step(self, scale: float) -> None:
        """Apply the gradients at `scale` times the base rates, then clear them."""
        nn.utils.clip_grad_norm_(self._clipped, 1.0)
        for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def train(budget: Budget, out: Path, seed: int, resume: Path | None) -> None:
    """Train within the budget, from scratch or from saved weights; the newest weights are in `out` all along."""
    plan = CONTINUED if resume else FROM_SCRATCH
    torch.set_num_threads(1)
    disable_progress_bar()
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(resume) if resume else train_tokenizer()
    model = build_model(tokenizer)
    if resume:
        model.load_state_dict(Qwen3VLForConditionalGeneration.from_pretrained(resume).state_dict())
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    pristine = copy.deepcopy(model)
    prepare_for_training(model)
    head = nn.Linear(HIDDEN, sum(MARKS.values()))
    optimizers = Optimizers(model, head)
    maker = BatchMaker(tokenizer)
    cpu_start, wall_start = time.process_time(), time.monotonic()
    seen: dict[str, list[float]] = defaultdict(list)
    saved, step = plan.tower_only, 0
    while (spent := budget.spent(cpu_start, wall_start)) < 1:
        with_text = spent >= plan.tower_only
        batch = maker.make(seed * 10_000_000 + step, with_text=with_text)
        loss, measures = compute_loss(model, head, batch, plan.tower_weight)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers.step(plan.rate(spent, step))
        step += 1
        for name, value in measures.items():
            seen[name].append(value)
        if step % LOG_EVERY == 0:
            shown = " ".join(f"{name} {sum(values) / len(values):.3f}" for name, values in seen.items())
            print(f"step {step} {spent:.1%} cpu {time.process_time() - cpu_start:.0f}s {shown}", flush=True)
            seen.clear()
        if spent > saved + 0.15:
            save(model, pristine, tokenizer, out)
            saved = spent
    save(model, pristine, tokenizer, out)
    cpu, wall = time.process_time() - cpu_start, time.monotonic() - wall_start
    print(f"done: {step} steps, {cpu / 60:.1f} CPU minutes, {wall / 60:.1f} minutes", flush=True)


def compute_loss(
    model: Qwen3VLForConditionalGeneration, head: nn.Module, batch: Batch, tower_weight: float
) -> tuple[Tensor, dict[str, float]]:
    """The training loss and what to print: of the tower alone where the batch carries no text."""
    with torch.autocast("cpu", torch.bfloat16):
        features, deepstack = encode_images(model.model.visual, batch.images)
        tower_loss, measures = _mark_loss(head(features.float()).float(), batch.marks)
        if not len(batch.input_ids):
            return tower_loss, measures
        language_model = model.model.language_model
        embeds = language_model.embed_tokens(batch.input_ids)
        is_image = batch.input_ids == model.config.image_token_id
        hidden = language_model(
            inputs_embeds=embeds.masked_scatter(is_image[..., None], features.to(embeds.dtype)),
            attention_mask=batch.mask,
            position_ids=batch.positions,
            visual_pos_masks=is_image,
            deepstack_visual_embeds=deepstack,
            use_cache=False,
        ).last_hidden_state
        answered = batch.targets != IGNORE
        logits = model.lm_head(hidden[answered])
    targets = batch.targets[answered]
    about_image = (torch.arange(len(answered)) < IMAGE_ROWS)[:, None].expand_as(answered)[answered]
    right = (logits.argmax(-1) == targets).float()
    text_loss = F.cross_entropy(logits.float(), targets)
    measures |= {
        "loss": text_loss.item(),
        "image-answers": right[about_image].mean().item(),
        "text-answers": right[~about_image].mean().item(),
    }
    return text_loss + tower_weight * tower_loss, measures


def save(
    model: nn.Module, pristine: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, out: Path
) -> None:
    """Write the weights in bfloat16 with all that the Auto classes need to load them."""
    exported = copy.deepcopy(pristine)
    exported.load_state_dict(model.state_dict())
    exported.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    for name, settings in PROCESSOR_FILES.items():
        (out / name).write_text(json.dumps(settings, indent=2) + "\n")


def _mark_loss(logits: Tensor, marks: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy of what each image token holds, and how often the tokens that hold a shape are right."""
    loss, measures = logits.new_zeros(()), {}
    holds = marks[:, 0].reshape(-1) > 0
    for index, (name, part) in enumerate(zip(MARKS, torch.split(logits, list(MARKS.values()), -1), strict=True)):
        wanted = marks[:, index].reshape(-1)
        weight = torch.ones(part.shape[-1])
        if name in ("shape", "color"):
            weight[0] = EMPTY_WEIGHT
        loss = loss + F.cross_entropy(part, wanted, weight=weight, ignore_index=IGNORE)
        measures[name] = (part[holds].argmax(-1) == wanted[holds]).float().mean().item()
    return loss, measures


def main() -> None:
    """Command-line entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-minutes", type=float, default=50)
    parser.add_argument("--wall-minutes", type=float, help="default: 1.25 times the CPU minutes")
    parser.add_argument("--seed", type=int, default=0, help="choose another one for each continuation")
    parser.add_argument("--resume", type=Path, help="weights to continue from, at a gentler rate")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    wall = args.wall_minutes or 1.25 * args.cpu_minutes
    train(Budget(cpu=args.cpu_minutes * 60, wall=wall * 60), args.out, args.seed, args.resume)


if __name__ == "__main__":
    main()

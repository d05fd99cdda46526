"""What each figure of a record is called, its unit and its meaning.

Knows words only; values are in record.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TIME_CLASSES = ("read_wait", "experts", "matmul", "attention", "router", "head", "sampling")
"""Where a phase's wall time goes. Exclusive: `experts` does not hold the waiting for reads. The rest is `other`."""

WEIGHT_CLASSES = ("experts", "matmul", "head")
"""The classes whose work is multiplying weights."""

METRICS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "model": ("", "name of the model"),
        "description": ("", "family, sizes and formats in words"),
        "parameters": ("", "parameters in all"),
        "backend": ("", "device that computed"),
        "devices": ("", "layers, experts and bytes of each, where several devices computed"),
        "isa": ("", "instruction set of the CPU kernels"),
        "precision": ("", "activations: fast, standard or exact"),
        "threads": ("", "threads that multiplied"),
        "threads_source": ("", "who set that number"),
        "context": ("tokens", "most tokens of prompt and answer together"),
        "seed": ("", "seed of the sampler"),
        "temperature": ("", "sampling temperature"),
        "top_p": ("", "probability sampled from"),
        "finish_reason": ("", "why generation ended"),
        "load_s": ("s", "from opening the model to being ready"),
        "first_token_s": ("s", "from the call to the first token"),
        "tokens": ("tokens", "tokens computed in this phase"),
        "wall_s": ("s", "time of this phase"),
        "tokens_per_s": ("tokens/s", "tokens by time"),
        "steps": ("", "forward passes"),
        "step_p50_s": ("s", "median time of a step"),
        "step_p90_s": ("s", "time that nine tenths of the steps keep"),
        "step_p99_s": ("s", "time that 99 of 100 steps keep"),
        "step_max_s": ("s", "slowest step"),
        "hits_pinned": ("experts", "experts wanted that are held for good"),
        "hits_lru": ("experts", "experts wanted that were still in memory"),
        "hits_prefetched": ("experts", "experts wanted that were read ahead in time"),
        "hits_device": ("experts", "experts wanted that were in the device's memory"),
        "on_host": ("experts", "experts wanted that the CPU computed beside a device"),
        "on_host_bytes": ("B", "bytes of those"),
        "sent": ("experts", "experts sent to the device's memory"),
        "sent_bytes": ("B", "bytes of those"),
        "prefetch_late": ("experts", "experts wanted whose read ahead was still under way"),
        "prefetch_wasted": ("experts", "experts read ahead that were not wanted"),
        "wasted_bytes": ("B", "bytes of those"),
        "joined": ("experts", "experts wanted whose read was under way already"),
        "loads": ("experts", "experts wanted that had to be read"),
        "hit_rate": ("1", "share of wanted experts that were in memory"),
        "wanted_per_token": ("experts/token", "experts wanted for one token, over all layers"),
        "wanted_per_layer": ("experts/token", "experts wanted for one token in one layer"),
        "loads_per_token": ("experts/token", "experts read for one token, over all layers"),
        "loads_per_layer": ("experts/token", "experts read for one token in one layer"),
        "read_bytes": ("B", "bytes of experts asked from the disk"),
        "read_bytes_per_token": ("B/token", "bytes of experts read for one token"),
        "read_service_s": ("s", "time of all reads, summed over the readers: not wall time"),
        "read_busy_s": ("s", "wall time with at least one read under way; 0 where it was not measured"),
        "read_bytes_per_s": ("B/s", "bytes read by the wall time with a read under way"),
        "read_bytes_per_s_per_reader": ("B/s", "bytes read by the time of all reads"),
        "reads_at_once": ("", "reads under way on average while there was one"),
        "read_busy_share": ("1", "part of the phase's time with a read under way"),
        "cold_read_bytes": ("B", "bytes of experts that came from storage in this phase, by the system's count"),
        "warm_read_bytes": ("B", "bytes of experts that came from pages in memory"),
        "read_wait_s": ("s", "wall time that computing stood still for a read"),
        "weight_bytes": ("B", "bytes of weights that were multiplied"),
        "shares": ("1", "parts of the phase's time by class; they add to 1"),
        "budget_bytes": ("B", "anonymous and locked memory that was granted"),
        "budget_source": ("", "who granted it"),
        "anonymous_bytes": ("B", "anonymous memory of the process at the end"),
        "locked_bytes": ("B", "locked memory of the process at the end"),
        "mapped_bytes": ("B", "mapped file pages in memory at the end; not part of the budget"),
        "peak_resident_bytes": ("B", "most memory of the process so far, mapped pages included"),
        "resident_experts": ("experts", "experts in memory at the end"),
        "resident_expert_bytes": ("B", "bytes of these"),
        "pinned_experts": ("experts", "those of them that are held for good"),
        "all_experts": ("experts", "experts of the model"),
        "all_expert_bytes": ("B", "bytes of these"),
        "expert_slots": ("experts", "experts that fit in memory per layer"),
        "moe_layers": ("", "layers with experts"),
        "experts_per_token": ("experts", "experts chosen per token and layer"),
        "prefetch": ("", "whether experts of the next layer are read before they are asked for, and what that saves"),
        "readers": ("", "threads that read"),
        "physical_read_bytes": ("B", "bytes that the process got from storage, by the system's count"),
        "memory_limit_bytes_per_s": ("B/s", "bytes per second that the memory of the weights gives, measured here"),
        "link_bytes_per_s": (
            "B/s",
            "bytes per second from the host's memory to the device's, measured here",
        ),
        "host_memory_bytes_per_s": (
            "B/s",
            "bytes per second that the host's memory gives to a CPU that computes beside a device, measured here",
        ),
        "device_experts": ("experts", "experts in the device's memory at the end"),
        "kernels": ("calls", "kernels that ran"),
        "fallbacks": ("calls", "kernels that ran in place of another one"),
        "lossy": ("", "lossy modes that were active, and what they left out"),
        "warnings": ("", "warnings of this run"),
        "verdict": ("", "what limits: disk, link, memory, compute, attention, balanced or nothing measured"),
        "verdict_text": ("", "the verdict in words"),
    }
)

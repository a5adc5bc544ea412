"""How many pages of KV fit: from a number of bytes, or from what the device has left."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from thinkfold.config import EngineConfig
from thinkfold.errors import ParameterError

# On a CPU the pool never takes more than this by itself, nor more than this share of free memory.
HOST_CAP = 4 << 30
HOST_SHARE = 0.5


def pool_pages(
    config: EngineConfig,
    max_model_len: int,
    page_bytes: int,
    device: torch.device,
    profile: Callable[[], None],
    later_bytes: int = 0,
) -> int:
    """Pages of the KV pool; never more than `max_num_seqs` requests of full length can use.

    `kv_cache_bytes` decides where it is given. Else on a GPU `profile` runs the largest forward
    and the pool takes what then is left of `gpu_memory_utilization` of the device, less the
    `later_bytes` that folds will allocate beside it. On a CPU it is `gpu_memory_utilization` of
    half of the free memory, at most 4 GiB, shared by all ranks; pages there cost memory only once
    they are written.
    Raises ParameterError if not even one request of two pages fits.
    """
    if config.kv_cache_bytes is not None:
        pages = config.kv_cache_bytes // page_bytes
    elif device.type == "cuda":
        free = _device_bytes(config.gpu_memory_utilization, device, profile) - later_bytes
        pages = fitting_pages(config, max_model_len, page_bytes, free)
    else:
        free = _free_host_bytes() * HOST_SHARE * config.gpu_memory_utilization
        pages = fitting_pages(
            config, max_model_len, page_bytes, int(min(HOST_CAP, free)) // config.tensor_parallel_size
        )
    if pages < 2:
        raise ParameterError("kv_cache_bytes", f"{pages} pages of {page_bytes} bytes fit, at least 2 are needed")
    return pages


def fitting_pages(config: EngineConfig, max_model_len: int, page_bytes: int, free: int) -> int:
    """Pages in `free` bytes, but no more than `max_num_seqs` requests of full length can use."""
    return min(config.max_num_seqs * -(-max_model_len // config.page_size), max(0, free) // page_bytes)


def model_len(config: EngineConfig, max_position: int) -> int:
    """The longest a request may be: as configured, else what the model reaches. Raises ParameterError beyond that."""
    if config.max_model_len is None:
        return max_position
    if config.max_model_len > max_position:
        raise ParameterError("max_model_len", f"the model reaches {max_position}, got {config.max_model_len}")
    return config.max_model_len


def host_pages(config: EngineConfig, page_bytes: int) -> int:
    """Pages of the host tier, 0 without one. Raises ParameterError if its bytes hold no page."""
    pages = config.swap_space_bytes // page_bytes
    if config.swap_space_bytes and not pages:
        raise ParameterError("swap_space_bytes", f"a page takes {page_bytes} bytes, got {config.swap_space_bytes}")
    return pages


def _device_bytes(utilization: float, device: torch.device, profile: Callable[[], None]) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * utilization) - (total - free) - activations)


def _free_host_bytes() -> int:
    """Memory that new work can take without swapping."""
    return psutil.virtual_memory().available

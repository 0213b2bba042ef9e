# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runner V2 on CPUs, with steps that are scheduled ahead, as on GPUs.

Its Triton kernels run in Triton's interpreter, because Triton has no CPU back end. The models' own kernels stay those of
CPUs.
"""

import importlib
import os
import sys

ENVIRONMENT = {"ASHLAR_TEST_RUNNER": "v2"}  # vLLM chooses V2 by default if it has Triton

_KERNELS = ("vllm.v1.worker.mamba_utils", "vllm.v1.worker.utils")


def wanted():
    return ENVIRONMENT.items() <= os.environ.items()


def run_on_cpu():
    """Imports the runner's modules again, with Triton in place of vLLM's placeholder. Call it before an engine starts,
    with TRITON_INTERPRET=1 set since before Triton was imported."""
    import triton
    import vllm.config.vllm as config
    import vllm.triton_utils as utils
    import vllm.v1.worker.gpu_worker as gpu_worker
    from vllm.platforms.cpu import CpuPlatform

    utils.triton, utils.tl = triton, importlib.import_module("triton.language")
    utils.tldevice = importlib.import_module("triton.language.extra.libdevice")
    for name in list(sys.modules):
        if name.startswith(("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu.")) or name in _KERNELS:
            del sys.modules[name]
    importlib.import_module("vllm.v1.worker.cpu.shm")
    importlib.import_module("vllm.v1.worker.cpu.model_runner")
    gpu_worker.HAS_TRITON = config.HAS_TRITON = utils.HAS_TRITON = True
    importlib.import_module(_KERNELS[0])._TEMPORAL_TILES = 1  # the interpreter runs tiles one by one

    own = CpuPlatform.check_and_update_config

    def check_and_update_config(vllm_config):
        ahead = vllm_config.scheduler_config.async_scheduling
        own(vllm_config)
        vllm_config.scheduler_config.async_scheduling = ahead

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)

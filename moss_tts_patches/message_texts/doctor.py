"""Sentences of ``moss-lowmem doctor``."""

from __future__ import annotations

DOCTOR_TEXTS: dict[str, tuple[str, str]] = {
    # -- machine ------------------------------------------------------------------------------------------------------
    "python": ("Python {found}.", "Python 版本：{found}。"),
    "python_old": ("Python {found}; 3.10 is the oldest that works.", "Python {found}；最低要求 3.10。"),
    "python_old.do": (
        "Create an environment with Python 3.10 or newer and install everything into it.",
        "请新建 Python 3.10 或更高版本的环境，并在其中重新安装。",
    ),
    "torch": (
        "torch {version} for CUDA {cuda}, driver {driver}, {gpu}.",
        "torch {version}（CUDA {cuda}），驱动 {driver}，{gpu}。",
    ),
    "no_gpu": ("torch {version} sees no GPU.", "torch {version} 没有检测到 GPU。"),
    "no_gpu.do": (
        "If there is one, moss-lowmem doctor asks its driver; without one, the CPU will do for the demo only.",
        "如果有 GPU，请运行 moss-lowmem doctor 检查驱动；没有 GPU 时，CPU 只适合演示。",
    ),
    "no_gpu_at_all": (
        "torch {version} sees no GPU, and nvidia-smi lists none.",
        "torch {version} 没有检测到 GPU，nvidia-smi 也没有列出 GPU。",
    ),
    "no_gpu_at_all.do": (
        "Training on the CPU works, for the demo and for tests; for a real model it takes a GPU with its driver.",
        "CPU 只适合演示和测试；训练真实模型需要装好驱动的 GPU。",
    ),
    "torch_for_cpu": (
        "torch {version} is built for the CPU only, while the driver {driver} sees {gpu}.",
        "torch {version} 是纯 CPU 版本，而驱动 {driver} 已识别 {gpu}。",
    ),
    "torch_for_cpu.do": (
        "Install a torch built for CUDA into this environment (the selector on pytorch.org gives the command).",
        "请在此环境中安装 CUDA 版 torch（安装命令见 pytorch.org）。",
    ),
    "gpu_out_of_reach": (
        "torch {version} for CUDA {cuda} cannot start CUDA, while the driver {driver} sees {gpu}.",
        "torch {version}（CUDA {cuda}）无法启动 CUDA，而驱动 {driver} 已识别 {gpu}。",
    ),
    "gpu_out_of_reach.do": (
        "Look whether CUDA_VISIBLE_DEVICES hides the GPU; otherwise update the driver, or install a torch for an older "
        "CUDA.",
        "请检查 CUDA_VISIBLE_DEVICES 是否隐藏了 GPU；否则请更新驱动，或安装面向较旧 CUDA 的 torch。",
    ),
    "no_kernels": (
        "{gpu} has compute capability {found}; torch {version} has kernels for {built_for} only.",
        "{gpu} 的计算能力为 {found}；torch {version} 只包含 {built_for} 的内核。",
    ),
    "no_kernels.do": (
        "Install a torch that supports the GPU: a newer one for a new card, an older one for an old card.",
        "请安装支持该 GPU 的 torch：新显卡用更新的版本，旧显卡用更旧的版本。",
    ),
    "bf16": ("{gpu} computes in bf16 (capability {found}).", "{gpu} 支持 bf16（计算能力 {found}）。"),
    "no_bf16": (
        "{gpu} has no bf16 arithmetic (capability {found}; 8.0 and more have it).",
        "{gpu} 不支持 bf16 运算（计算能力 {found}；需要 8.0 及以上）。",
    ),
    "no_bf16.do": (
        "Train with --mixed-precision no (float32, twice the GPU memory); fp16 is refused for full training.",
        "请使用 --mixed-precision no（float32，显存翻倍）；全参数训练不接受 fp16。",
    ),
    "vram": ("GPU memory: {free} of {total} are free.", "显存：共 {total}，空闲 {free}。"),
    "vram_held": (
        "GPU memory: only {free} of {total} are free. Held by: {holders}.",
        "显存：共 {total}，仅空闲 {free}。占用者：{holders}。",
    ),
    "vram_held.do": (
        "Close what holds it (nvidia-smi shows it), or plan for what is free.",
        "请关闭占用显存的程序（用 nvidia-smi 查看），或按空闲显存选择方案。",
    ),
    "vram_short": (
        "GPU memory: the plan takes {wanted}; {free} of {total} are free. Held by: {holders}.",
        "显存：方案需要 {wanted}；共 {total}，空闲 {free}。占用者：{holders}。",
    ),
    "vram_short.do": (
        "Close what holds it, or take a smaller plan: moss-lowmem plan lists them.",
        "请关闭占用显存的程序，或选择更小的方案：moss-lowmem plan 会列出。",
    ),
    # -- host ---------------------------------------------------------------------------------------------------------
    "ram": ("Host memory: {free} of {total} are available.", "内存：共 {total}，可用 {free}。"),
    "ram_unknown": ("Host memory: this system does not say how much there is.", "内存：系统没有提供内存信息。"),
    "ram_unknown.do": (
        "Look yourself: gradients and states in host memory take 6 bytes for each trained parameter.",
        "请自行确认：内存中的梯度和优化器状态每个可训练参数约需 6 字节。",
    ),
    "ram_little": ("Host memory: only {free} of {limit} are available.", "内存：上限 {limit}，仅可用 {free}。"),
    "ram_little.do": (
        "Close other programs: loading a model alone takes as much host memory as its file is large.",
        "请关闭其他程序：仅加载模型就需要与模型文件大小相当的内存。",
    ),
    "ram_short": (
        "Host memory: the plan takes {wanted}; {free} of {total} are available.",
        "内存：方案需要 {wanted}；共 {total}，可用 {free}。",
    ),
    "ram_short.do": (
        "Close other programs, or keep more on the GPU: MOSS_LOWMEM_STATES=device, or MOSS_LOWMEM_GRADIENTS=device; "
        "MOSS_LOWMEM_HOST_GRADIENT_DTYPE=bfloat16 halves the gradients.",
        "请关闭其他程序，或把更多数据留在 GPU 上：MOSS_LOWMEM_STATES=device 或 MOSS_LOWMEM_GRADIENTS=device；"
        "MOSS_LOWMEM_HOST_GRADIENT_DTYPE=bfloat16 可使梯度占用减半。",
    ),
    "cgroup": (
        "Host memory: this container may use {limit} of {total}; {free} are available ({group}).",
        "内存：此容器上限为 {limit}（机器共 {total}），可用 {free}（{group}）。",
    ),
    "cgroup.do": (
        "Passing the limit is a kill without a message; give the container more (docker run --memory) where it counts.",
        "超过上限会被直接杀死且没有任何提示；需要时请提高容器上限（docker run --memory）。",
    ),
    "cgroup_short": (
        "Host memory: the plan takes {wanted}; this container may use {limit}, {free} of it are available ({group}).",
        "内存：方案需要 {wanted}；此容器上限为 {limit}，可用 {free}（{group}）。",
    ),
    "cgroup_short.do": (
        "Raise the container's limit (docker run --memory, the memory of the job), or keep more on the GPU: "
        "MOSS_LOWMEM_STATES=device, MOSS_LOWMEM_GRADIENTS=device.",
        "请提高容器上限（docker run --memory 或作业的内存设置），或把更多数据留在 GPU 上：MOSS_LOWMEM_STATES=device、"
        "MOSS_LOWMEM_GRADIENTS=device。",
    ),
    "swapping": ("Swap: {used} of {total} are taken.", "交换空间：共 {total}，已用 {used}。"),
    "swapping.do": (
        "The machine is short of memory already; training that swaps is slower by an order of magnitude. Close other "
        "programs.",
        "机器内存已经不足；训练若使用交换空间会慢一个数量级。请关闭其他程序。",
    ),
    "pinned": ("Host memory can be page-locked.", "内存可以锁页。"),
    "not_pinned": (
        "Host memory cannot be page-locked ({reason}).",
        "内存无法锁页（{reason}）。",
    ),
    "not_pinned.do": (
        "Training works with the same numbers; copies between host and GPU are slower and do not overlap. WSL2 and "
        "containers limit it: raise ulimit -l and the memory of the virtual machine.",
        "训练结果不变，但主机与 GPU 之间的拷贝更慢且无法重叠。WSL2 和容器会限制锁页内存："
        "请提高 ulimit -l 和虚拟机内存。",
    ),
    "wsl": (
        "This is WSL2 (memory of the virtual machine: {ram}). When GPU memory is full, its driver moves data into "
        "system RAM without a word: training does not fail, it becomes ten times slower.",
        "这是 WSL2（虚拟机内存 {ram}）。显存用满时，驱动会悄悄把数据换到系统内存：训练不会报错，但会慢十倍。",
    ),
    "wsl.do": (
        "In the NVIDIA control panel set 'CUDA - Sysmem Fallback Policy' to 'Prefer No Sysmem Fallback', so that it "
        "fails instead. Give the virtual machine more RAM: memory= in .wslconfig. Native Linux has neither problem.",
        "请在 NVIDIA 控制面板中把“CUDA - 系统内存回退策略”设为“首选无系统内存回退”，这样会直接报错。"
        "可在 .wslconfig 中用 memory= 增加虚拟机内存；原生 Linux 没有这两个问题。",
    ),
    # -- storage ------------------------------------------------------------------------------------------------------
    "disk": (
        "Disk: {count} checkpoint(s) of {one} take {wanted}; {free} are free in {folder}.",
        "磁盘：{count} 个检查点（每个 {one}）共需 {wanted}；{folder} 空闲 {free}。",
    ),
    "disk_unknown": ("Disk: {free} are free in {folder}.", "磁盘：{folder} 空闲 {free}。"),
    "disk_full": (
        "Disk: one checkpoint takes {one}; {free} are free in {folder}.",
        "磁盘：一个检查点需要 {one}；{folder} 仅空闲 {free}。",
    ),
    "disk_full.do": (
        "Make room, or set OUTPUT_DIR to a larger disk: the training would end when it first saves.",
        "请清理磁盘，或把 OUTPUT_DIR 设到更大的磁盘：否则训练会在第一次保存时中断。",
    ),
    "disk_short": (
        "Disk: {count} checkpoints of {one} take {wanted}; {free} are free in {folder}, enough for {fitting}.",
        "磁盘：{count} 个检查点（每个 {one}）共需 {wanted}；{folder} 空闲 {free}，只够 {fitting} 个。",
    ),
    "disk_short.do": (
        "Make room before that many epochs have passed, train fewer epochs, or set OUTPUT_DIR to a larger disk.",
        "请在训练到该轮数之前清理磁盘、减少训练轮数，或把 OUTPUT_DIR 设到更大的磁盘。",
    ),
    "save": ("A trial save into {folder} worked ({size} bytes).", "已成功试写 {folder}（{size} 字节）。"),
    "save_failed": ("A trial save into {folder} failed: {reason}.", "试写 {folder} 失败：{reason}。"),
    "save_failed.do": (
        "Make the folder writable, or set OUTPUT_DIR to another one: the training would end when it first saves.",
        "请使该文件夹可写，或更换 OUTPUT_DIR：否则训练会在第一次保存时中断。",
    ),
    "other_run": (
        "{folder} holds checkpoints of another run ({names}; {difference}).",
        "{folder} 中有另一次训练的检查点（{names}；{difference}）。",
    ),
    "other_run.do": (
        "Set OUTPUT_DIR to a new folder, or move those away: checkpoints of two runs would stand side by side.",
        "请把 OUTPUT_DIR 设为新文件夹，或移走这些检查点：否则两次训练的检查点会混在一起。",
    ),
    "earlier_run": (
        "{folder} holds checkpoints of an earlier run ({names}).",
        "{folder} 中有之前训练的检查点（{names}）。",
    ),
    "earlier_run.do": (
        "They will be replaced one by one as epochs end. To keep them, set OUTPUT_DIR to a new folder.",
        "每轮结束时它们会被逐个替换。若要保留，请把 OUTPUT_DIR 设为新文件夹。",
    ),
    # -- engine -------------------------------------------------------------------------------------------------------
    "deepspeed": ("No broken deepspeed is installed.", "没有损坏的 deepspeed 安装。"),
    "broken_deepspeed": ("{reason}", "{reason}"),
    "broken_deepspeed.do": (
        "One of three: pip uninstall deepspeed (the layer does not need it); install a CUDA toolkit with nvcc and set "
        "CUDA_HOME to it; train in an environment without deepspeed.",
        "三选一：pip uninstall deepspeed（本工具不需要它）；安装带 nvcc 的 CUDA toolkit 并设置 CUDA_HOME；"
        "在没有 deepspeed 的环境中训练。",
    ),
    "config_unreadable": ("{reason}", "{reason}"),
    "config_unreadable.do": ("Correct the file or its path.", "请修正该文件或其路径。"),
    "zero3_without_weights": (
        "{path}: ZeRO-3 without zero3_save_16bit_model: true cannot gather the weights; the training would end when it "
        "first saves.",
        "{path}：ZeRO-3 未设置 zero3_save_16bit_model: true，无法收集权重；训练会在第一次保存时中断。",
    ),
    "zero3_without_weights.do": (
        "Set zero3_save_16bit_model: true under deepspeed_config (stage3_gather_16bit_weights_on_model_save in "
        "deepspeed's own file).",
        "请在 deepspeed_config 下设置 zero3_save_16bit_model: true（deepspeed 自己的配置文件中为 "
        "stage3_gather_16bit_weights_on_model_save）。",
    ),
    "zero3_alone": (
        "{path}: ZeRO-3 on one GPU without offload shards nothing and saves nothing.",
        "{path}：单卡 ZeRO-3 且没有 offload，不会切分任何东西，也不省显存。",
    ),
    "zero3_alone.do": (
        "Unset ACCELERATE_CONFIG_FILE: plain training with this layer needs less.",
        "请取消 ACCELERATE_CONFIG_FILE：使用本工具的单进程训练占用更少。",
    ),
    "codec_on_gpu": (
        "prepare_data.py will put the audio tokenizer on the GPU (PREP_DEVICE={device}, {free} free).",
        "prepare_data.py 会把音频编码器放到 GPU 上（PREP_DEVICE={device}，空闲 {free}）。",
    ),
    "codec_on_gpu.do": (
        "If preparation runs out of memory, PREP_DEVICE=cpu does the same more slowly; SKIP_PREPARE=1 where the data "
        "is prepared already.",
        "如果数据准备阶段显存不足，可用 PREP_DEVICE=cpu（结果相同，速度较慢）；数据已准备好时用 SKIP_PREPARE=1。",
    ),
}

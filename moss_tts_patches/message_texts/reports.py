"""Sentences of the out-of-memory report and of what is said after a kill."""

from __future__ import annotations

REPORT_TEXTS: dict[str, tuple[str, str]] = {
    # -- out of memory ------------------------------------------------------------------------------------------------
    "phase load": ("the loading of the model", "加载模型"),
    "phase forward chunk": ("the forward pass", "前向计算"),
    "phase backward": ("the backward pass", "反向计算"),
    "phase optimizer state creation": ("the creation of optimizer states (first step)", "创建优化器状态（第一步）"),
    "phase optimizer step": ("the optimizer step", "优化器更新"),
    "phase validation": ("the evaluation of the validation records", "评估验证集"),
    "phase save": ("the saving of a checkpoint", "保存检查点"),
    "phase other": ("something else", "其他阶段"),
    "oom_gpu": ("GPU memory ran out during {phase}: {wanted} were wanted.", "显存不足，发生在{phase}：需要 {wanted}。"),
    "oom_host": (
        "Host memory ran out during {phase}: {wanted} were wanted.",
        "内存不足，发生在{phase}：需要 {wanted}。",
    ),
    "oom_gpu_state": (
        "The GPU has {total}, {free} of it free; tensors take {allocated}.",
        "显存共 {total}，空闲 {free}；张量占用 {allocated}。",
    ),
    "oom_host_state": (
        "This process may use {limit}, {free} are available; it takes {process}. Free swap: {swap}.",
        "本进程上限 {limit}，可用 {free}；已占用 {process}。空闲交换空间：{swap}。",
    ),
    "oom_fragmented": (
        "{unused} are reserved in pieces that are too small: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps on "
        "native Linux.",
        "{unused} 以过小的碎片形式被保留：在原生 Linux 上可设置 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True。",
    ),
    "oom_spilled": (
        "More is allocated than the card has: the driver had spilled into system RAM, so training was slow before it "
        "failed.",
        "已分配的显存超过显卡容量：驱动已把数据溢出到系统内存，因此失败之前训练就已变慢。",
    ),
    "oom_category": (
        "  {category}: planned {planned}, found {found}",
        "  {category}：计划 {planned}，实际 {found}",
    ),
    "oom_records": ("Records in the batch (positions): {records}.", "本批样本（位置数）：{records}。"),
    "oom_candidate": ("{setting} would save {saved}.", "{setting} 可节省 {saved}。"),
    "oom_no_candidate": (
        "No placement is left to change: use shorter records, QLoRA, or see what fits with moss-lowmem plan.",
        "已没有可调整的放置方式：请使用更短的样本或 QLoRA，或用 moss-lowmem plan 查看可行方案。",
    ),
    "oom_written": ("Written to {path}.", "已写入 {path}。"),
    # -- after a kill -------------------------------------------------------------------------------------------------
    "ended_by_the_layer": (
        "The training was stopped by this, whatever stands in between: {message}",
        "训练因此停止（中间的报错只是它的后果）：{message}",
    ),
    "ended_sigkill": (
        "The command was killed by the system (SIGKILL, status {status}).",
        "命令被系统杀死（SIGKILL，退出码 {status}）。",
    ),
    "ended_sigterm": (
        "The command was told to end by somebody else (SIGTERM, status {status}).",
        "命令被外部要求终止（SIGTERM，退出码 {status}）。",
    ),
    "ended_passed_on": (
        "The command was told to end ({signal}, passed on by this launcher).",
        "命令被要求终止（{signal}，由本启动器转发）。",
    ),
    "ended_without_a_word": (
        "A training process ended without a word: killed by the system, or crashed (status {status} of the command).",
        "训练进程无任何提示地结束：被系统杀死或崩溃（命令退出码 {status}）。",
    ),
    "ended_readings": (
        "Last readings of the training process {pid}, during {phase}: it took {process} of host memory; {free} of "
        "{limit} were available.",
        "训练进程 {pid} 最后的读数（{phase}）：占用内存 {process}；上限 {limit}，可用 {free}。",
    ),
    "ended_gpu_readings": ("GPU memory: {free} of {total} free.", "显存：共 {total}，空闲 {free}。"),
    "ended_oom_kill": (
        "Host memory was full: the kernel killed {count} process(es) for lack of it meanwhile. Keep more on the GPU "
        "(MOSS_LOWMEM_STATES=device, MOSS_LOWMEM_GRADIENTS=device), halve the gradients "
        "(MOSS_LOWMEM_HOST_GRADIENT_DTYPE=bfloat16), or add RAM.",
        "内存已满：期间内核因内存不足杀死了 {count} 个进程。请把更多数据留在 GPU 上（MOSS_LOWMEM_STATES=device、"
        "MOSS_LOWMEM_GRADIENTS=device）、将梯度减半（MOSS_LOWMEM_HOST_GRADIENT_DTYPE=bfloat16），或增加内存。",
    ),
    "ended_host_full": (
        "Host memory was full. Keep more on the GPU (MOSS_LOWMEM_STATES=device, MOSS_LOWMEM_GRADIENTS=device), halve "
        "the gradients (MOSS_LOWMEM_HOST_GRADIENT_DTYPE=bfloat16), close other programs, or add RAM.",
        "内存已满。请把更多数据留在 GPU 上（MOSS_LOWMEM_STATES=device、MOSS_LOWMEM_GRADIENTS=device）、将梯度减半"
        "（MOSS_LOWMEM_HOST_GRADIENT_DTYPE=bfloat16）、关闭其他程序，或增加内存。",
    ),
    "ended_group_full": (
        "The memory limit of the container was reached. Raise it (docker run --memory, the memory of the job), or keep "
        "more on the GPU (MOSS_LOWMEM_STATES=device, MOSS_LOWMEM_GRADIENTS=device).",
        "已达到容器的内存上限。请提高上限（docker run --memory 或作业的内存设置），或把更多数据留在 GPU 上"
        "（MOSS_LOWMEM_STATES=device、MOSS_LOWMEM_GRADIENTS=device）。",
    ),
    "ended_gpu_full": (
        "GPU memory was full. Move more to host memory (MOSS_LOWMEM_GRADIENTS=host, MOSS_LOWMEM_STATES=host).",
        "显存已满。请把更多数据移到内存（MOSS_LOWMEM_GRADIENTS=host、MOSS_LOWMEM_STATES=host）。",
    ),
    "ended_spilled": (
        "More GPU memory was allocated than the card has: the driver spilled into system RAM. Move more to host memory "
        "on purpose (MOSS_LOWMEM_GRADIENTS=host, MOSS_LOWMEM_STATES=host).",
        "已分配的显存超过显卡容量：驱动把数据溢出到系统内存。请主动把更多数据移到内存（MOSS_LOWMEM_GRADIENTS=host、"
        "MOSS_LOWMEM_STATES=host）。",
    ),
    "ended_not_full": (
        "Neither host memory nor the GPU was full at that time: somebody or something else ended it (a scheduler's "
        "limit, another user, a crash of the driver).",
        "当时内存和显存都没有用满：是其他原因结束了训练（调度器限制、其他用户、驱动崩溃）。",
    ),
    "ended_no_readings": (
        "No training process had written readings, and the kernel counted no kill for lack of memory: it was ended "
        "before training began, or by somebody else.",
        "没有训练进程写下读数，内核也没有记录因内存不足的杀死：它在训练开始前结束，或被他人终止。",
    ),
}

"""LoRA and QLoRA: PEFT injects and merges, bitsandbytes quantises; here is what is chosen, checked and saved."""

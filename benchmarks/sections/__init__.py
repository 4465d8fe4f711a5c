"""The parts of docs/benchmarks.md: each module turns results files into Markdown."""

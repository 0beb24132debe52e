"""Where vLLM has its server."""

from stand_in import main

if __name__ == "__main__":
    main("vllm", "--model")

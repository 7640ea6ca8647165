# An image with a torch for NVIDIA GPUs, this checkout, and CUTLASS's kernels:
#
#     docker build -t te_inductor .
#     docker run --rm --gpus all te_inductor                                  # says what runs on this machine
#     docker run --rm --gpus all -v "$PWD":/work te_inductor python train.py
#
# The host has the driver and the NVIDIA Container Toolkit. CUDA's libraries come with torch.
FROM python:3.12-slim

# Triton compiles its launchers with the C compiler, Inductor its CPU code with the C++ one.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# The version that all figures of docs/performance.md are from.
ARG TORCH=2.11.0
RUN python -m pip install --no-cache-dir "torch==$TORCH" numpy

COPY . /src
RUN python -m pip install --no-cache-dir "/src[cutlass,checkpoints]"

# A user without rights on the host's files, whose caches are kept where a volume can be put.
RUN useradd --create-home user && mkdir /cache /work && chown user /cache /work
USER user
ENV TORCHINDUCTOR_CACHE_DIR=/cache/inductor TRITON_CACHE_DIR=/cache/triton OMP_WAIT_POLICY=passive
WORKDIR /work
CMD ["te-inductor", "doctor", "--compile"]

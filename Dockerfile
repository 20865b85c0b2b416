# syntax=docker/dockerfile:1
# megarl for CUDA 13: `docker build --build-arg CUDA_DIGEST=sha256:... -t megarl:0.2.0 .`, then `docker run --gpus all --shm-size 16g ...` (docs/operations.md).
#
# Versions are those of requirements.txt and requirements-cuda.txt; a test holds this file and the hashes to them.
ARG CUDA=13.0.2
# A tag may change, a digest cannot; without one docker refuses the reference and shows this text. It is printed by
# `docker buildx imagetools inspect nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04`.
ARG CUDA_DIGEST=give--build-arg-CUDA_DIGEST=sha256:HEX

# --- Python and everything that is installed from wheels -------------------------------------------------------------
FROM nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04@${CUDA_DIGEST} AS packages
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git ninja-build patch python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/megarl PATH=/opt/megarl/bin:/usr/local/cuda/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python3 -m venv "$VIRTUAL_ENV"
WORKDIR /build
COPY requirements-hashes.txt requirements-cuda-hashes.txt ./
# The list is complete, so nothing is resolved, and all are wheels whose hash is compared; torch comes as the CUDA 13 build
# that PyPI has.
RUN pip install --no-deps --only-binary :all: --require-hashes -r requirements-hashes.txt
# What SGLang and torch need besides on a GPU; Transformer Engine is built below.
RUN pip install --no-deps --only-binary :all: --require-hashes -r requirements-cuda-hashes.txt

# --- What has to be compiled for that torch --------------------------------------------------------------------------
FROM packages AS kernels
ARG TORCH_CUDA_ARCH_LIST="8.0 9.0 10.0"
ARG NVTE_CUDA_ARCHS="80;90;100"
ARG MAX_JOBS=8
ENV NVTE_FRAMEWORK=pytorch
# What it brings along must not change what is there; it is compiled here, so its files have no hash.
RUN pip freeze > installed.txt \
    && pip install --no-build-isolation -c installed.txt 'transformer-engine[core_cu13,pytorch]==2.11.0'

# --- megarl itself, and the patches ----------------------------------------------------------------------------------
FROM kernels AS built
COPY . megarl
RUN pip install --no-deps --no-build-isolation ./megarl \
    && python -m megarl.tools.doctor.packages \
    && megarl --version \
    && rm -rf /build

# --- What is run: no compiler of ours, no root -----------------------------------------------------------------------
# The devel image: SGLang and Triton compile kernels when they are first used.
FROM nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04@${CUDA_DIGEST} AS megarl
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap build-essential iproute2 libnuma1 numactl patch procps \
        python3-dev tini \
    && rm -rf /var/lib/apt/lists/* \
    && (userdel --remove ubuntu || true) \
    && useradd --create-home --uid 1000 megarl \
    && install -d -o megarl -g megarl /work
COPY --from=built /opt/megarl /opt/megarl
ENV VIRTUAL_ENV=/opt/megarl PATH=/opt/megarl/bin:/usr/local/cuda/bin:$PATH \
    RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1
USER megarl
WORKDIR /work
# What a container must have before any role can start: imports, limits, shared memory, the driver's GPUs.
HEALTHCHECK --interval=5m --timeout=60s --start-period=30s --retries=2 CMD ["megarl", "doctor", "--json"]
# Signals reach megarl, and nobody else's children stay behind.
ENTRYPOINT ["tini", "--"]
CMD ["megarl", "--help"]

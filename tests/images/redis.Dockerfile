# Stands in for the chart's store where the usual image cannot be pulled: Debian's Redis.
ARG BASE
FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends redis-server redis-tools \
 && rm -rf /var/lib/apt/lists/*

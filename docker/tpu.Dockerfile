# bert_jax on TPUs: for Cloud TPU VMs, and for GKE with launch/gke_jobset.sh. Has not been run on a TPU.
#
#   docker build --file docker/tpu.Dockerfile --tag bert-jax:tpu .
#   docker run --rm --privileged --network host --volume "$PWD:/work" bert-jax:tpu pretrain --help
FROM python:3.13-slim

LABEL org.opencontainers.image.title="bert_jax (tpu)" \
      org.opencontainers.image.description="BERT pre-training in JAX and Flax" \
      org.opencontainers.image.licenses="Apache-2.0"

ENV BERT_JAX_CACHE=/tmp/bert_jax \
    MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONUNBUFFERED=1

RUN useradd --create-home --uid 1000 bert && install --directory --owner=bert --group=bert /work

# Dependencies first: this layer is rebuilt only if a supported version or a constraint changes.
WORKDIR /opt/bert_jax
COPY constraints/py313.txt constraints/
COPY requirements.txt ./
RUN pip install --no-cache-dir --constraint constraints/py313.txt --requirement requirements.txt 'gcsfs>=2024.6' 'jax[tpu]'

COPY setup.py pyproject.toml README.md LICENSE ./
COPY configs configs
COPY bert_jax bert_jax
RUN pip install --no-cache-dir --no-deps . \
 && bert-jax --version

USER 1000
WORKDIR /work
ENTRYPOINT ["bert-jax"]
CMD ["--help"]

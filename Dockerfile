# tff_bn with its programs, on the CPU or on NVIDIA GPUs:
#   docker build --tag tff_bn .
#   docker build --tag tff_bn:cuda --build-arg DEVICE=cuda .
#   docker run --volume "$PWD/runs:/work/runs" tff_bn tff-bn-compare
#   docker run --gpus all --volume "$PWD/runs:/work/runs" tff_bn:cuda tff-bn-train
FROM python:3.13-slim

# cpu or cuda.
ARG DEVICE=cpu

WORKDIR /opt/tff_bn
# The versions change less often than the code, so that Docker keeps this layer.
# The steps are those of scripts/setup.sh.
COPY requirements*.txt ./
RUN grep -E '^(setuptools|wheel)==' requirements.txt >build-requirements.txt \
    && pip install --no-cache-dir --no-deps --ignore-requires-python \
        -r build-requirements.txt \
    && pip install --no-cache-dir --no-deps --ignore-requires-python \
        --no-build-isolation -r requirements.txt \
    && case "$DEVICE" in \
        cpu) ;; \
        cuda) pip install --no-cache-dir --no-deps --ignore-requires-python \
            -r requirements-cuda.txt ;; \
        *) echo "DEVICE=$DEVICE must be cpu or cuda." >&2; exit 1 ;; \
    esac
COPY . .
RUN pip install --no-cache-dir --no-deps --ignore-requires-python \
        --no-build-isolation --editable .

# The programs write to runs/.
WORKDIR /work
CMD ["tff-bn-train", "--help"]

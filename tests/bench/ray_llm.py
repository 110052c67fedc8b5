"""Ray Serve LLM serving one model until it is told to end. Run in the peers' environment, where this project is not:

python ray_llm.py MODEL_FOLDER MODEL_NAME PORT TEMP_FOLDER ENGINE_KWARGS_JSON
"""

import json
import sys

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app


def main() -> None:
    """Returns when standard input ends."""
    folder, name, port, temp, engine = sys.argv[1:]
    ray.init(address="local", include_dashboard=False, num_cpus=8, object_store_memory=256 << 20, _temp_dir=temp)
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
    config = LLMConfig(
        model_loading_config={"model_id": name, "model_source": folder},
        accelerator_config={"kind": "cpu"},
        deployment_config={"num_replicas": 1, "max_ongoing_requests": 1000},
        engine_kwargs=json.loads(engine),
    )
    serve.run(build_openai_app({"llm_configs": [config]}), logging_config={"enable_access_log": False})
    sys.stdin.read()


if __name__ == "__main__":
    main()

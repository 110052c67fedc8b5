"""Binds the deployments, once and top to bottom. The only file of the library that imports ray.

`serve deploy` calls `build_app` with the `args` of the Serve config file.
"""

from typing import Any

from ray import serve
from ray.serve import Application

from deployments.engine import EngineDeployment
from deployments.gateway import GatewayDeployment
from deployments.insight import InsightDeployment
from deployments.options import engine_options, hop_options, insight_options
from deployments.postprocess import PostprocessDeployment
from deployments.tokenizer import TokenizerDeployment
from serve_app.config import load


def build_app(args: dict[str, Any]) -> Application:
    """gateway → tokenizer, and gateway → postprocess → engine; each reports to insight. Raises ConfigError that names
    the key."""
    config = load(args)
    insight = serve.deployment(InsightDeployment, **insight_options(config.insight)).bind(config)
    engine = serve.deployment(EngineDeployment, **engine_options(config.engine)).bind(config, insight)
    postprocess = serve.deployment(PostprocessDeployment, **hop_options("postprocess", config.postprocess)).bind(
        config, engine, insight
    )
    tokenizer = serve.deployment(TokenizerDeployment, **hop_options("tokenizer", config.tokenizer)).bind(
        config, insight
    )
    gateway = serve.deployment(serve.ingress()(GatewayDeployment), **hop_options("gateway", config.gateway))
    return gateway.bind(config, tokenizer, postprocess, insight)

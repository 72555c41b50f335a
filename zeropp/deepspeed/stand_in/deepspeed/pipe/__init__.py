"""Placeholders for DeepSpeed's pipelines, which zeropp does not have. Scripts can import and subclass them."""

from zeropp.deepspeed.refused_modules import NO_PIPELINES, refused

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]

LayerSpec = refused("pipe.LayerSpec", NO_PIPELINES)
PipelineModule = refused("pipe.PipelineModule", NO_PIPELINES)
TiedLayerSpec = refused("pipe.TiedLayerSpec", NO_PIPELINES)

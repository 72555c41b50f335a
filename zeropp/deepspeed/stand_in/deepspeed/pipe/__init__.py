"""Pipelines, which zeropp has not: classes that scripts import, and derive others from, and cannot make."""

from zeropp.deepspeed.refused_modules import NO_PIPELINES, refused

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]

LayerSpec = refused("pipe.LayerSpec", NO_PIPELINES)
PipelineModule = refused("pipe.PipelineModule", NO_PIPELINES)
TiedLayerSpec = refused("pipe.TiedLayerSpec", NO_PIPELINES)

from bench.gpu.part import Part

PART = Part("reasons", "", [], lambda scale: [])

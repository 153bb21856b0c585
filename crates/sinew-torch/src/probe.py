import importlib
import json
import platform

report = {"python": platform.python_version(), "packages": {}, "cuda": None, "gpus": []}
for name in ("torch", "transformers", "peft", "safetensors", "msgspec", "blake3"):
    try:
        module = importlib.import_module(name)
        report["packages"][name] = str(getattr(module, "__version__", "unknown"))
    except Exception:
        report["packages"][name] = None
if report["packages"]["torch"]:
    import torch

    report["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            report["gpus"].append({"name": device.name, "bytes": device.total_memory})
print(json.dumps(report))

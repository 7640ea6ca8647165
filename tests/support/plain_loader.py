"""Run as a program: load folders by transformers alone, in a process that has no te_inductor, and save what it finds.

Arguments: a file for the result, and folders. Of each folder: what its keys lack, its logits as loaded, and the weights
and logits of the model that is dequantized while it is loaded."""

import json
import sys
from pathlib import Path

import torch
import transformers

IDS = torch.arange(7).unsqueeze(0)


def found(folder: Path) -> dict[str, object]:
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    kind = {"fp8": "FineGrainedFP8Config", "compressed-tensors": "CompressedTensorsConfig"}[method]
    plain = getattr(transformers, kind)(dequantize=True)
    made = {}
    for name, given in (("as_it_is", {}), ("dequantized", {"quantization_config": plain})):
        if name == "dequantized" and "mixed" in folder.name:  # compressed-tensors takes one group for all then
            continue
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **given)
        with torch.no_grad():
            made[name] = {"lost": {key: sorted(map(str, one)) for key, one in info.items() if one}}
            made[name]["logits"] = model(IDS).logits
            made[name]["weights"] = {key: one.detach().clone() for key, one in model.named_parameters()}
    if folder.name in ("block", "mixed"):  # names of layers have to fit the model without its head, too
        body = transformers.AutoModel.from_pretrained(folder)
        with torch.no_grad():
            body(IDS)
        made["body"] = {"lost": {}, "weights": {key: one.detach() for key, one in body.named_parameters()}}
    return made


def main(out: str, *folders: str) -> None:
    result = {folder: found(Path(folder)) for folder in folders}
    # torch imports its backends' packages by their entry points, and so ours, but nothing that knows of transformers.
    assert not any(name.startswith(("te_inductor.integrations", "te_inductor.api.check")) for name in sys.modules)
    torch.save(result, out)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The published protocols as functions of tensors: k-NN, linear, few-shot, linear segmentation."""

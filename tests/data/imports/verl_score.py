def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = float(ground_truth in solution_str)
    return {"score": right, "length": len(solution_str), "index": extra_info["index"]}

# Supervised fine-tuning behind a main: the script may be imported.
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer


def main():
    train = load_dataset("json", data_files="answers.jsonl", split="train")
    args = SFTConfig(output_dir="answers", max_length=64, packing=True, num_train_epochs=1, learning_rate=2e-5)
    trainer = SFTTrainer("tiny", args=args, train_dataset=train)
    trainer.train()


if __name__ == "__main__":
    main()

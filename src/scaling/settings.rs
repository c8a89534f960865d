//! The settings to paste, framework by framework.

/// A place where a loss scale is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framework {
    /// `torch.amp.GradScaler`.
    PyTorch,
    /// DeepSpeed's JSON configuration.
    DeepSpeed,
    /// Megatron-LM's command line.
    Megatron,
    /// fairseq's command line.
    Fairseq,
    /// Hugging Face Accelerate.
    Accelerate,
    /// PyTorch Lightning.
    Lightning,
}

impl Framework {
    /// All of them, in the order of the JSON.
    pub const ALL: [Framework; 6] = [
        Framework::PyTorch,
        Framework::DeepSpeed,
        Framework::Megatron,
        Framework::Fairseq,
        Framework::Accelerate,
        Framework::Lightning,
    ];

    /// The key in JSON.
    pub fn key(self) -> &'static str {
        match self {
            Framework::PyTorch => "pytorch",
            Framework::DeepSpeed => "deepspeed",
            Framework::Megatron => "megatron",
            Framework::Fairseq => "fairseq",
            Framework::Accelerate => "accelerate",
            Framework::Lightning => "lightning",
        }
    }

    /// The name that people use.
    pub fn label(self) -> &'static str {
        match self {
            Framework::PyTorch => "PyTorch",
            Framework::DeepSpeed => "DeepSpeed",
            Framework::Megatron => "Megatron-LM",
            Framework::Fairseq => "fairseq",
            Framework::Accelerate => "Accelerate",
            Framework::Lightning => "Lightning",
        }
    }

    /// The policy that it runs.
    pub fn policy(self) -> &'static str {
        match self {
            Framework::PyTorch | Framework::Accelerate | Framework::Lightning => "torch-amp",
            Framework::DeepSpeed => "deepspeed",
            Framework::Megatron => "megatron",
            Framework::Fairseq => "fairseq",
        }
    }

    /// The lines to paste for a growth interval and a start, a power of two.
    pub fn paste(self, growth_interval: u64, init_scale: f64) -> String {
        let (n, s) = (growth_interval, python_float(init_scale));
        match self {
            Framework::PyTorch => {
                format!("torch.amp.GradScaler(\"cuda\", init_scale={s}, growth_interval={n})")
            }
            Framework::DeepSpeed => format!(
                "\"fp16\": {{\"enabled\": true, \"loss_scale\": 0, \"initial_scale_power\": {}, \"loss_scale_window\": {n}, \"hysteresis\": 2, \"min_loss_scale\": 1}}",
                crate::float::exact_log2(init_scale).unwrap_or(16).max(0)
            ),
            Framework::Megatron => {
                format!(
                    "--fp16 --initial-loss-scale {s} --loss-scale-window {n} --hysteresis 2 --min-loss-scale 1.0"
                )
            }
            Framework::Fairseq => format!(
                "--fp16 --fp16-init-scale {} --fp16-scale-window {n}",
                plain(init_scale)
            ),
            Framework::Accelerate => format!(
                "Accelerator(mixed_precision=\"fp16\", kwargs_handlers=[GradScalerKwargs(init_scale={s}, growth_interval={n})])"
            ),
            Framework::Lightning => format!(
                "Trainer(plugins=[MixedPrecision(\"16-mixed\", \"cuda\", scaler=torch.amp.GradScaler(\"cuda\", init_scale={s}, growth_interval={n}))])"
            ),
        }
    }
}

/// PyTorch with a scale that never moves: an interval that is never reached stops growth, but an overflow would still
/// halve; handing the scale to `update` keeps it.
pub fn pytorch_static(scale: f64) -> String {
    let s = python_float(scale);
    format!(
        "scaler = torch.amp.GradScaler(\"cuda\", init_scale={s}, growth_interval=2**31 - 1); and each step: scaler.update(new_scale={s})"
    )
}

/// A scale as Python writes a float.
fn python_float(scale: f64) -> String {
    match crate::float::exact_log2(scale) {
        Some(e) if !(-10..=40).contains(&e) => format!("2.0**{e}"),
        _ => format!("{scale:?}"),
    }
}

fn plain(scale: f64) -> String {
    if scale >= 1.0 && scale.fract() == 0.0 && scale < 1e15 {
        format!("{}", scale as u64)
    } else {
        format!("{scale:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_framework_is_told_in_its_own_words() {
        let texts: Vec<String> = Framework::ALL
            .iter()
            .map(|f| f.paste(900, 65536.0))
            .collect();
        assert!(texts.iter().all(|text| text.contains("900")), "{texts:?}");
        assert!(texts[1].contains("\"initial_scale_power\": 16"));
        assert!(texts[3].contains("--fp16-init-scale 65536"));
        assert!(pytorch_static(1024.0).contains("update(new_scale=1024.0)"));
        assert!(
            Framework::PyTorch
                .paste(1, 2f64.powi(60))
                .contains("2.0**60")
        );
    }
}

//! A model learns with our gradients as it does with exact ones.

use hopper_attention::Result;
use hopper_attention_tests::say;
use hopper_attention_tests::training::{Attention, Curves, OnCpu, Setup};

/// Ours, but for a gradient of keys that lacks one head.
struct Broken(OnCpu, Setup);

impl Attention for Broken {
    fn forward(&mut self, q: &[f32], k: &[f32], v: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        self.0.forward(q, k, v)
    }

    fn backward(&mut self, inputs: [&[f32]; 3], o: &[f32], lse: &[f32], d_o: &[f32]) -> Result<[Vec<f32>; 3]> {
        let [d_q, mut d_k, d_v] = self.0.backward(inputs, o, lse, d_o)?;
        d_k.chunks_mut(self.1.heads_kv * self.1.head_dim).for_each(|token| token[..self.1.head_dim].fill(0.0));
        Ok([d_q, d_k, d_v])
    }
}

#[test]
fn our_gradients_train_as_exact_ones_do() {
    let setup = Setup { batch: 4, seqlen: 64, heads_q: 4, heads_kv: 2, head_dim: 16, width: 64, steps: 160 };
    let curves = Curves::new(setup, &mut OnCpu::new(&setup).unwrap()).unwrap();
    say(&curves.verdict().unwrap());
    let broken = curves.with(setup, &mut Broken(OnCpu::new(&setup).unwrap(), setup)).unwrap();
    say(&format!("caught: {}", broken.verdict().unwrap_err()));
}

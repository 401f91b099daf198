//! A sentence encoder with real weights: with our attention it gives the embeddings of candle-transformers' own model.

use candle_core::{Device, Result, Tensor};
use candle_transformers::models::bert::BertModel;
use hopper_attention_candle::{Options, attention};
use hopper_attention_integration_tests::minilm::{self, Encoder, Model, SENTENCES, embedding_of};
use hopper_attention_integration_tests::{difference, say};

#[test]
fn sentences_have_the_embeddings_of_candles_own_model() -> Result<()> {
    let Some(folder) = minilm::folder() else {
        say(
            "skipped: no model; scripts/make_fixture.py --model FOLDER makes one, and HATTN_MINILM_DIR=FOLDER names it",
        );
        return Ok(());
    };
    let model = Model::open(&folder)?;
    let ours = Encoder::load(model.weights(&Device::Cpu)?, &model.config)?;
    let theirs = BertModel::load(model.weights(&Device::Cpu)?, &model.config)?;
    let attend = |q: &Tensor, k: &Tensor, v: &Tensor| attention(q, k, v, &Options::new());
    let (mut worst, mut embeddings) = (0f32, Vec::new());
    for sentence in SENTENCES {
        let tokens = model.tokens(sentence, &Device::Cpu)?;
        let own = embedding_of(&theirs.forward(&tokens, &tokens.zeros_like()?, None)?)?;
        let embedding = embedding_of(&ours.forward(&tokens, &attend)?)?;
        worst = worst.max(difference(&embedding, &own)?.0);
        embeddings.push(embedding);
    }
    say(&format!("{} sentences: the embeddings differ by at most {worst:.1e}", SENTENCES.len()));
    assert!(worst <= 2e-6, "{worst}");
    // The numbers mean something: sentences that say the same are nearer than those that do not.
    let near = |a: usize, b: usize| (&embeddings[a] * &embeddings[b])?.sum_all()?.to_scalar::<f32>();
    for same in [0, 3] {
        let (alike, other) = (near(same, same + 1)?, near(same, same + 2)?);
        assert!(alike > 0.5 && other < 0.2, "{alike} and {other}");
    }
    // The comparison can fail.
    let tokens = model.tokens(SENTENCES[0], &Device::Cpu)?;
    let wrong = |q: &Tensor, k: &Tensor, v: &Tensor| attention(q, k, v, &Options::new().softmax_scale(0.18));
    let wrong = embedding_of(&ours.forward(&tokens, &wrong)?)?;
    assert!(difference(&wrong, &embeddings[0])?.0 > 1e-5);
    Ok(())
}

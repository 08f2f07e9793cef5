/* fuzz_merges.c - a merges file: what is accepted is a tokenizer that writes itself down so that it comes
 * back the same, and that encodes any text so that it comes back the same.
 *
 * The input is the merges' text and, behind its first NUL, a text to encode. */
#include "fuzz.h"

#include <jansson.h>

#include "../../tokenizer/bpe.h"

static void check_encoding(const Bpe *bpe, const uint8_t *text, size_t size, bool special) {
    BpeEncoder *encoder = bpe_encoder_new(bpe, 16);
    Tokens ids = {0};
    Buffer back = {0};
    Error err;
    if (special) bpe_encode_special(encoder, text, size, &ids);
    else bpe_encode(encoder, text, size, &ids);
    for (size_t i = 0; i < ids.count; i++)
        MUST(special ? ids.ids[i] < bpe_vocab_size(bpe) : ids.ids[i] < bpe_end_of_text(bpe));
    MUST(bpe_decode(bpe, ids.ids, ids.count, &back, &err));
    MUST(back.size == size && (size == 0 || memcmp(back.data, text, size) == 0));
    buffer_free(&back);
    tokens_free(&ids);
    bpe_encoder_free(encoder);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t size) {
    const uint8_t *nul = size ? memchr(input, 0, size) : NULL;
    const size_t merges_size = nul ? (size_t)(nul - input) : size;
    Error err = {0};
    Bpe *bpe = bpe_from_merges_text(input, merges_size, "input.merges", &err);
    if (!bpe) {
        fuzz_check_error(&err, "input.merges");
        return 0;
    }
    Buffer merges = {0}, again = {0}, json = {0};
    bpe_merges_text(bpe, &merges);
    Bpe *same = bpe_from_merges_text(merges.data, merges.size, "again", &err);
    MUST(same && bpe_same(bpe_fingerprint(bpe), bpe_fingerprint(same)));
    bpe_merges_text(same, &again);
    MUST(again.size == merges.size && memcmp(again.data, merges.data, again.size) == 0);

    bpe_tokenizer_json(bpe, &json);
    json_t *parsed = json_loadb((const char *)json.data, json.size, JSON_REJECT_DUPLICATES, NULL);
    MUST(json_object_size(json_object_get(json_object_get(parsed, "model"), "vocab")) == bpe_vocab_size(bpe));
    json_decref(parsed);

    if (nul) {
        check_encoding(bpe, nul + 1, size - merges_size - 1, false);
        check_encoding(bpe, nul + 1, size - merges_size - 1, true);
    }
    buffer_free(&json);
    buffer_free(&again);
    buffer_free(&merges);
    bpe_free(same);
    bpe_free(bpe);
    return 0;
}

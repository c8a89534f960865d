//! Reading dumps: named tensors, handed out in bounded chunks.
